"""What a mask selects, of each element or of all of them, is computed without knowing how many there are."""

import functools
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.testing import assert_same


def same_in_one(f, make, calls=6, entries=1, grad=True):
    """`f` is captured whole, and not anew for another number of elements; its gradients are eager's."""
    compiled = kiln.compile(f, fullgraph=True)
    for i in range(calls):
        given = make(i)
        kept = [[t.clone().requires_grad_(grad and t.is_floating_point()) for t in given] for _ in range(2)]
        expected, result = f(*kept[0]), compiled(*kept[1])
        assert_same(result, expected, rtol=1e-4, atol=1e-5)
        for tensor, other in zip(*kept, strict=True):
            assert_same(other.detach(), tensor.detach())
        if grad and isinstance(expected, torch.Tensor) and expected.requires_grad:
            expected.float().sum().backward()
            result.float().sum().backward()
            for tensor, other in zip(*kept, strict=True):
                assert_same(other.grad, tensor.grad, rtol=1e-4, atol=1e-5)
    assert len(compiled._entries) == entries


def numbers(*shape):
    return lambda i: [torch.randn(*shape, generator=torch.Generator().manual_seed(10 * i + k)) for k in range(2)]


def log_of(x, y):
    return x[x > 0.1].log().mean()


def root_of_difference(x, y):
    mask = x > y
    return (x[mask] - y[mask]).sqrt().sum()


def normal(x, y):
    kept = x[x > -0.5]
    return (kept - kept.mean().detach()) / (kept.std().detach() + 1e-5) * 2


def rows(x, y):
    mask = x[:, 0] > 0
    apart = x[mask] - x[mask].mean(dim=0).detach()
    return (
        F.mse_loss(x[mask], y[mask])
        + apart.square().mean(0).sum()
        + (x[mask] * y[mask, :].sum(0).detach()).sum()
        + F.l1_loss(x[mask], x[mask] * 2)
    )


def rows_of_rows(x, y):
    mask = x.mean(-1) > 0
    chosen = torch.softmax(x[mask], dim=-1)
    away = 1 - F.cosine_similarity(x[mask], y[mask], dim=-1)
    unit = F.normalize(x[mask], dim=1) * x[mask].norm(dim=-1).unsqueeze(-1)
    return chosen.amax(-1).sum() + chosen[:, 0].mean() + away.mean() + (unit**3).sum()


def written_back(x, y):
    x = x * 2
    mask = x > 0.5
    x[mask] = y[mask] * 3 + x[mask]
    return x


def scaled(x, y):
    x = x * 2
    x[x > 0.5] *= 3
    x[x < 0] += 1
    x[x[:, 0] > 0] /= y[0].detach().exp()
    return x.sin()


def given_back(x, y):
    return (x * 2)[y > 0], y[y > 0]


def counted(x, y):
    mask = x > y
    chosen = x[mask]
    return chosen.sum() / max(len(chosen), 1) + chosen.numel() + x[x > y].size(0)


def selected(x, y):
    mask = x > y
    return torch.masked_select(x, mask).mean() + y.masked_select(mask).abs().max() - x[mask].min()


def the_same_twice(x, y):
    x = x * 1
    x[x > 0.5] = y[x > 0.5].exp()
    x[(x > 0.2) & (y < 0)] *= 2
    return x[x > 0].sum() / y[(x > 0)].sum().detach()


def parts(x, y):
    x = x * 1
    mask = y[:, 0] > 0
    x[mask, 2:] += y[mask, 2:]
    x[mask, 1] = x[mask, 0] * 2
    return x[mask, -1].mean() + x[mask, :].sum() + x


def correct(x, y):
    mask = y[:, 0] > 0
    return (x[mask].argmax(1) == y[mask].argmax(dim=-1)).float().mean() + (x[mask] > 0).sum()


def of_classes(x, y):
    labels = y.abs().sum(-1).mul(3).long().clamp(0, 7)
    mask = y[:, 1] > 0
    own = torch.log_softmax(x[mask], -1).gather(1, labels[mask].unsqueeze(1)).squeeze(1)
    return F.cross_entropy(x[mask], labels[mask], label_smoothing=0.1) - own.mean()


def compared(x, y):
    mask = torch.logical_not(x > y)
    logits, target = x[mask], (y[mask] > 0).float()
    return (
        F.binary_cross_entropy_with_logits(logits, target)
        + F.smooth_l1_loss(logits, target, reduction="none", beta=0.5).sum()
    )


WHOLE = (
    *(log_of, root_of_difference, written_back, scaled, given_back, compared, of_classes, correct, normal, rows),
    *(rows_of_rows, counted, selected, the_same_twice, parts),
)


@pytest.mark.parametrize("f", WHOLE, ids=lambda f: f.__name__)
def test_one_graph(f):
    same_in_one(f, numbers(6, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    def f(x):
        mask = x > 0.25
        return (x[mask] * 3).mean(), x[mask].sum(dim=0), x[mask].relu().to(torch.float32)

    for n in (3, 40):
        x = torch.randn(n, 5).to(dtype)
        compiled = kiln.compile(f)
        assert_same(compiled(x), f(x))


def test_masks_of_the_labels_that_count():
    """The number decides in the first call, as one mask may be the same in all of them."""

    def f(x, labels):
        return F.cross_entropy(x[labels != -100], labels[labels != -100])

    def make(i):
        g = torch.Generator().manual_seed(i)
        labels = torch.randint(0, 9, (4, 10), generator=g)
        labels[torch.rand(4, 10, generator=g) > 0.3] = -100
        return torch.randn(4, 10, 9, generator=g), labels

    same_in_one(f, make, entries=2)


def test_open_sizes():
    def f(x, mask):
        x = x * 2
        return x[mask].mean(), x[mask.float() > 0.5] + 1

    compiled = kiln.compile(f)
    for n in (3, 4, 5, 6, 7):
        x, mask = torch.randn(n, 2), torch.arange(n) % 2 == 0
        assert_same(compiled(x, mask), f(x, mask))
    with pytest.raises(IndexError, match="shape of the mask"):
        compiled(torch.randn(5, 2), torch.tensor([True]))

    def shared(x, y):
        return x[(torch.arange(6) < x.shape[1])].sum() + y[(torch.arange(6) < y.shape[1])].sum() * 2

    compiled = kiln.compile(shared)
    for n in (3, 4, 5, 6):
        x, y = torch.randn(6, n), torch.randn(6, 7 - n)
        assert_same(compiled(x, y), shared(x, y))


def test_memory_that_is_written_between_two_masks():
    def f(x):
        x = x * 1
        chosen = x[x > 0]
        x[0] -= 1
        x[x > 0] = 7.0
        other = x.abs()
        first = other[other > 0.5]
        other += 1
        return chosen, first.sum(), other[other > 0.5].sum(), x

    compiled = kiln.compile(f)
    for i in range(3):
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
        assert_same(compiled(x), f(x))

    def wrong(x):
        x = x * 1
        before = x[x > 0]
        x[0] = -x[0]
        x[x > 0] = before
        return x

    x = torch.tensor([[1.0, 2.0, -1.0], [3.0, -1.0, 1.0]])
    with pytest.raises(RuntimeError) as expected:
        wrong(x)
    with pytest.raises(RuntimeError) as raised:
        kiln.compile(wrong)(x)
    assert str(raised.value) == str(expected.value)


def test_none_selected():
    def f(x, limit):
        chosen = x[x > limit]
        return chosen.sum(), chosen.mean(), chosen.exp(), (chosen == 1).all(), (chosen == 1).any()

    compiled = kiln.compile(f, fullgraph=True)
    x = torch.randn(3, 4)
    for limit in (0.0, 100.0):
        assert_same(compiled(x, torch.tensor(limit)), f(x, torch.tensor(limit)))


def test_what_else_is_asked_of_it():
    """Whatever is not computed of each element, or of all of them."""
    functions = {
        "cat": lambda x: torch.cat([x[x > 0], x[x < 0]]),
        "list": lambda x: [v * 2 for v in x[x > 0]][0],
        "sort": lambda x: x[x > 0].sort()[0],
        "dropout": lambda x: F.dropout(x[x[:, 0] > 0], 0.0).sum(0),
        "linear": lambda x: F.linear(x[x[:, 0] > 0], x[:5]),
        "first": lambda x: x[x > 0][0],
        "again": lambda x: x[x[:, 0] > 0][x[x[:, 0] > 0][:, 1] > 0],
        "size": lambda x: torch.zeros(x[x > 0].shape[0]) + x[x > 0].numel(),
        "type": lambda x: type(x[x > 0]) is torch.Tensor and isinstance(x[x > 0], torch.Tensor),
        "attribute": lambda x: x[x > 0].is_contiguous(),
        "text": lambda x: f"{x[x > 0.5]}",
        "item": lambda x: x[x == x.max()].item(),
        "truth": lambda x: bool(x[x == x.max()]),
        "other": lambda x: x[x[:, 0] > 0] * x[x[:, 0] > 0].mean(0, keepdim=True),
        "parameter": lambda x: torch.nn.Parameter(x[x > 0]),
        "stack": lambda x: torch.stack((x[x > 0], x[x > 0] + 1)),
        "swapped": lambda x: x[x[:, 0] > 0].t(),
        "in": lambda x: 3 in x[x > 0],
        "numpy": lambda x: x[x > 0].numpy().sum().item(),
        "pair": lambda x: (lambda y: (y, y[:, 0].mul_(2)))(x[x[:, 0] > 0]),
        "shared": lambda x: (lambda y: (y, y.detach()))(x[x > 0]),
        "written": lambda x: (lambda y: (y.mul_(2), y.add_(1)))(x[x > 0]),
        "index": lambda x: x[0][(x[0] > 0).nonzero()[:, 0]][(x[0][x[0] > 0] * 0).long()],
        "where": lambda x: torch.where(x[x > 0] > 0.5, x[x > 0], 0.0),
        "max": lambda x: x[x[:, 0] > 0].max(1)[1],
        "view": lambda x: x[x[:, 0] > 0].view(-1),
        "dict": lambda x: {"a": [x[x > 0]], "b": x[x > 0]},
        "std": lambda x: x[x > 0].std(),
        "by name": lambda x: torch.flatten(input=x[x > 0]) + torch.squeeze(input=x[x > 0], dim=0).sum(),
        "int": lambda x: (x[x > 0] * 10).long() // (x[x > 0] * 10 + 3).long(),
    }
    for name, f in functions.items():
        compiled = kiln.compile(f)
        for i in range(3):
            x = torch.randn(6, 6, generator=torch.Generator().manual_seed(i))
            x[:, :2] = x[:, :2].abs()
            expected, result = f(x.clone()), compiled(x.clone())
            if isinstance(expected, torch.Tensor | tuple | dict | list):
                assert_same(result, expected)
            else:
                assert result == expected and type(result) is type(expected), name
    x = torch.randn(4, 4)
    y, z = kiln.compile(functions["shared"])(x)
    y.zero_()
    assert not z.any()
    one, other = kiln.compile(functions["written"])(x)
    assert one is other


def test_what_c_code_is_given():
    """PyTorch's bindings take what says that it is a tensor for one: nothing but tensors may reach them."""

    def both(x):
        return [x[x > 0], x[x > 0] + 1]

    functions = [
        lambda x: list(map(torch.exp, both(x))),
        lambda x: list(map(operator.mul, both(x), both(x))),
        lambda x: sum(both(x)),
        lambda x: functools.reduce(torch.add, both(x)),
        lambda x: list(itertools.starmap(torch.add, [both(x)])),
        lambda x: list(itertools.accumulate(both(x))),
        lambda x: [isinstance(x[x > 0], c) for c in (torch.Tensor, torch.FloatTensor, nn.Parameter, int, object)],
        lambda x: isinstance(x[x > 0], (int, torch.Tensor)) and torch.is_tensor(x[x > 0]),
        lambda x: x[x > 0].__class__ is torch.Tensor and x[x > 0].mean.__name__,
        lambda x: dict(enumerate(both(x))),
        matched,
    ]
    for f in functions:
        compiled = kiln.compile(f)
        for i in range(3):
            x = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
            assert_same(compiled(x), f(x))


def matched(x):
    match x[x > 0]:
        case torch.Tensor():
            return x * 2
    return x


def test_results_of_their_own():
    """Copies, in-place functions, promotion by tensors of one element, layouts, and gradients at zero."""

    def copied(x):
        a = x[x > 0]
        b = a.to(torch.float32, copy=True)
        b += 1
        return a, b

    def in_place(x):
        a = x[x > 0]
        b = F.relu(a, True)
        b += 1
        return a, b

    functions = [
        copied,
        in_place,
        lambda x: x.half()[x > 0] + torch.ones(1),
        lambda x: x.long()[x > 0].to(torch.int32) * torch.ones(1, dtype=torch.int64),
        lambda x: x[:, :, None, None].expand(5, 5, 3, 2)[x[:, 0] > 0].contiguous(memory_format=torch.channels_last),
        lambda x: nn.ReLU()(x[x > 0]) + F.relu(x[x > 0], inplace=False),
        lambda x: x[x[:, 0] > 0].gather(1, (x[x[:, 0] > 0].abs().long() - 0).clamp(0, 4)),
        lambda x: F.binary_cross_entropy(x[x > 0].sigmoid() * 1.0, x[x > 0].sigmoid()),
    ]
    for f in functions:
        compiled = kiln.compile(f)
        for i in range(3):
            x = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
            assert_same(compiled(x), f(x))

    def deviation(x, y):
        return (x[y > 0] * 1).std()

    x, y = torch.ones(6, requires_grad=True), torch.randn(6)
    assert_same(*[torch.autograd.grad(g(x, y), x)[0] for g in (deviation, kiln.compile(deviation))])


def test_losses_with_options():
    functions = [
        lambda a, b: F.mse_loss(a, b, size_average=False),
        lambda a, b: F.l1_loss(a, b, reduce=False),
        lambda a, b: F.mse_loss(a, b, weight=b.abs()),
        lambda a, b: F.l1_loss(a, b, weight=b.abs(), reduction="sum"),
        lambda a, b: F.huber_loss(a, b, delta=0.3),
        lambda a, b: F.smooth_l1_loss(a, b, beta=0.2, reduction="sum"),
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=torch.tensor(2.0)),
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), weight=b.abs()),
    ]
    for loss in functions:

        def f(x, y, loss=loss):
            return loss(x[x > 0], y[x > 0])

        compiled = kiln.compile(f)
        for _ in range(3):
            x, y = torch.randn(5, 5), torch.randn(5, 5)
            assert_same(compiled(x, y), f(x, y), rtol=1e-4, atol=1e-5)


def test_memory_that_changes_between():
    """A selection is of what the tensor, and the mask, were when it was made."""

    def f(x):
        x = x * 1
        mask = x > 0
        before = x[mask]
        x.mul_(2)
        mask[0] = False
        after = x[mask]
        x[mask] = after * before.mean()
        x.data[mask] = 0.0
        return before, after, x

    compiled = kiln.compile(f)
    for i in range(3):
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
        assert_same(compiled(x), f(x))

    def keep(state, x):
        state["chosen"] = x[x > 0]
        x += 1
        kiln.graph_break()
        return state["chosen"] * 2

    compiled = kiln.compile(keep)
    for i in range(3):
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
        one, other, a, b = {}, {}, x.clone(), x.clone()
        assert_same(compiled(one, a), keep(other, b))
        assert_same(one["chosen"], other["chosen"])
        assert_same(a, b)


def test_errors():
    def different(x):
        x = x * 1
        x[x > 0] = x[x < 100]
        return x

    def leaf(x):
        x[x > 0] *= 2
        return x

    def no_mean(x):
        return x.long()[x > 0].mean()

    def no_negative(x):
        return x[x > 0].isnan().neg()

    for f, x in (
        (different, torch.randn(8, 8)),
        (leaf, torch.randn(8, 8, requires_grad=True)),
        (no_mean, torch.randn(8, 8)),
        (no_negative, torch.randn(8, 8)),
    ):
        with pytest.raises(RuntimeError) as expected:
            f(x)
        with pytest.raises(RuntimeError) as raised:
            kiln.compile(f)(x)
        assert str(raised.value) == str(expected.value)


def test_what_autograd_keeps():
    """Where eager refuses a backward, since something that it kept was written, it is refused."""

    def mask(x):
        selected = x[:, 0] > 0
        y = x[selected] * 2
        selected[0] = ~selected[0]
        return y.sum()

    def itself(x):
        y = x[x > 0]
        y *= y
        return y.sum()

    def later(x):
        y = x[x > 0]
        z = y.square()
        y += 1
        return z.sum()

    def operand(x):
        y = x.detach() * 1
        y = y[x > 0]
        z = x[x > 0] * y
        y += 1
        return z.sum()

    for f in (mask, itself, later, operand):
        for g in (f, kiln.compile(f)):
            x = torch.randn(6, 6, requires_grad=True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                g(x).backward()

    def allowed(x):
        y = x[x > 0]
        y *= 3
        y += 1
        return y.exp().sum()

    x = torch.randn(6, 6, requires_grad=True)
    assert_same(*[torch.autograd.grad(g(x), x)[0] for g in (allowed, kiln.compile(allowed, fullgraph=True))])


def test_training_steps():
    """The whole step is one graph: logits of masked tokens only."""

    def train(compiler):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 32), torch.nn.GELU())
        head = torch.nn.Linear(32, 20)
        optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-2)

        def step(tokens, labels):
            optimizer.zero_grad()
            logits = head(net(tokens))
            mask = labels != -100
            loss = F.cross_entropy(logits[mask], labels[mask])
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = compiler(step)
        losses = []
        for _ in range(8):
            tokens = torch.randint(0, 20, (4, 12))
            losses.append(step(tokens, torch.where(torch.rand(4, 12) < 0.4, tokens, -100)))
        return losses, step

    expected, _ = train(lambda f: f)
    losses, step = train(lambda f: kiln.compile(f, fullgraph=True))
    assert_same(losses, expected, rtol=1e-4, atol=1e-5)
    assert len(step._entries) <= 3
