"""One model, inputs of many sizes: what does not depend on the size is made once, and the results are eager's."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import training_step
from kiln.testing import assert_same


@pytest.fixture(autouse=True)
def limits():
    with kiln.config.patch(recompile_limit=100):
        yield


class Encoder(torch.nn.Module):
    """A transformer's layer with learned places, and a head."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.words = torch.nn.Embedding(50, width)
        self.places = torch.nn.Embedding(300, width)
        self.norm1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.head = torch.nn.Linear(width, 50)

    def forward(self, ids):
        b, n = ids.shape
        x = self.words(ids) + self.places(torch.arange(n))
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        weights = (q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, n, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.second = torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.last = torch.nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.interpolate(F.silu(self.second(x)), scale_factor=2, mode="nearest")
        return self.last(x.mean((2, 3)))


def ids(b, n):
    return torch.randint(0, 50, (b, n))


MODELS = {
    "encoder": (Encoder, [ids(*s) for s in ((4, 32), (4, 33), (2, 100), (4, 129), (3, 7), (1, 5), (5, 1), (9, 128))]),
    "pictures": (
        Pictures,
        [torch.randn(s) for s in ((2, 3, 32, 32), (3, 3, 32, 32), (2, 3, 33, 47), (1, 3, 64, 48), (8, 3, 20, 20))],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference(name):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    compiled = kiln.compile(model)
    with torch.no_grad():
        for _ in range(3):  # weights are packed in the second call
            for x in inputs:
                assert_same(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    make, inputs = MODELS[name]

    def losses(compile):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        run = compile(training_step(model, optimizer))
        return [run(x).item() for _ in range(2) for x in inputs]

    assert losses(kiln.compile) == pytest.approx(losses(lambda f: f), rel=1e-4)


def test_weights_that_change_between_sizes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)).eval()
    compiled = kiln.compile(model)
    inputs = [torch.randn(n, 64) for n in (16, 17, 40)]
    with torch.no_grad():
        for turn in range(4):
            for x in inputs:
                for _ in range(3):
                    assert_same(compiled(x), model(x), rtol=1e-4, atol=1e-5)
                if turn % 2:
                    model[0].weight.mul_(0.9)
            model[2].weight.add_(0.01)
        model[2].weight = torch.nn.Parameter(torch.randn(64, 96))
        for x in inputs * 2:
            assert_same(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_folded_weights_are_shared_and_change():
    """BatchNorm folded into a convolution's weight: made of weights alone, for all sizes of pictures."""
    torch.manual_seed(0)
    model = Pictures().eval()
    compiled = kiln.compile(model)
    with torch.no_grad():
        for turn in range(3):
            for x in MODELS["pictures"][1]:
                assert_same(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model.norm.running_var.mul_(1.5)
            if turn == 1:
                model.norm.weight.mul_(2)


@pytest.mark.parametrize("kind", ["packed", "folded"])
def test_weights_are_held_once(kind):
    def resident():  # MB
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096 / 1e6

    if kind == "packed":
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).eval()
    else:
        layers = [m for _ in range(4) for m in (torch.nn.Conv2d(512, 512, 3), torch.nn.BatchNorm2d(512))]
        model = torch.nn.Sequential(*layers).eval()
    weights = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    compiled = kiln.compile(model)
    with torch.no_grad():
        for n in (16, 17, 18):
            x = torch.ones(n, 1024) if kind == "packed" else torch.ones(1, 512, n, n)
            for _ in range(3):
                compiled(x)
            if n == 16:
                before = resident()
    assert resident() - before < weights


def test_codes_are_shared():
    """A new batch size or length needs no new code."""

    def f(x, w):
        h = F.layer_norm(x + x.roll(1, -1), x.shape[-1:], w)
        return F.gelu(h).transpose(1, 2).contiguous(), h.square().sum(-1)

    compiled = kiln.compile(f, dynamic=False)
    w = torch.randn(256)

    def generates_code(*sizes):
        x = torch.randn(*sizes, 256)
        assert_same(compiled(x, w), f(x, w), rtol=1e-4, atol=1e-4)
        stages = dict(kiln._C.stage_times())
        assert "codegen" in stages
        return "codegen.llvm" in stages

    assert generates_code(4, 152)
    assert not generates_code(3, 152)
    assert not generates_code(4, 184)
    with kiln.config.patch(disable_passes="codegen.reuse"):
        assert generates_code(5, 152)


def test_what_a_step_calls_is_compiled_where_its_own_sizes_stay_new(capfd):
    """Several sequences in each step: their lengths are few, and hardly ever come together again."""

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = torch.nn.RNN(8, 32), torch.nn.Linear(32, 5)

        def forward(self, x):
            return F.log_softmax(self.head(self.rnn(x)[1][0]), dim=1)

    def train(compile, steps):
        torch.manual_seed(0)
        net = Reader()
        opt = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(batch):
            loss = sum(F.nll_loss(net(x), y) for x, y in batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        step = compile(step)
        losses, lengths = [], torch.randint(2, 9, (steps, 6)).tolist()
        for i, row in enumerate(lengths):
            losses.append(step([(torch.randn(n, 1, 8), torch.tensor([n % 5])) for n in row]))
            if i % 50 == 0 and "with what it calls compiled" in (text := capfd.readouterr().err):
                told.append(text)
        return losses, list(net.parameters())

    told = []
    with kiln.config.patch(recompile_limit=8):
        kiln.set_logs("recompiles")
        try:
            actual = train(kiln.compile, 500)
        finally:
            kiln.set_logs("")
    assert told
    assert_same(actual, train(lambda f: f, 500), rtol=1e-3, atol=1e-4)
