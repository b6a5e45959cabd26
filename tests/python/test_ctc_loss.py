"""F.ctc_loss: its lengths are data, which an operator of the graph reads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from helpers import check, check_calls

T, N, C, S = 20, 3, 6, 5


def sample(seed=0, dtype=torch.float32, index=torch.int64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, N, C, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(1, C, (N, S), generator=g, dtype=index)
    inputs = torch.randint(T // 2, T + 1, (N,), generator=g, dtype=index)
    sizes = torch.randint(1, S + 1, (N,), generator=g, dtype=index)
    return x, targets, inputs, sizes


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_in_rows(reduction, dtype):
    def f(x, targets, inputs, sizes):
        return F.ctc_loss(x.log_softmax(-1) * 2, targets, inputs, sizes, reduction=reduction)

    for index in (torch.int64, torch.int32):
        check(f, *sample(1, dtype, index), fullgraph=True)
    check_calls(f, [sample(seed, dtype) for seed in range(5)])


def test_targets_in_one_line_and_lengths_in_lists():
    def f(x, targets, inputs, sizes, reduction):
        return F.ctc_loss(x.log_softmax(-1), targets, inputs, sizes, blank=2, reduction=reduction)

    x, targets, inputs, sizes = sample()
    targets = targets + (targets >= 2)
    line = torch.cat([t[:n] for t, n in zip(targets % C, sizes.tolist())])
    for reduction in ("none", "mean"):
        check(f, x, line, inputs, sizes, reduction, fullgraph=True)
        check(f, x, line, inputs.tolist(), tuple(sizes.tolist()), reduction, fullgraph=True)
        check(f, x, targets % C, inputs.tolist(), sizes.tolist(), reduction, fullgraph=True)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_losses_without_an_alignment(zero_infinity):
    def f(x, targets, inputs, sizes):
        return F.ctc_loss(x.log_softmax(-1), targets, inputs, sizes, reduction="none", zero_infinity=zero_infinity)

    x, targets, _, _ = sample()
    check(f, x, targets, torch.tensor([2, 20, 0]), torch.tensor([5, 3, 0]))


def test_one_sequence_and_empty_targets():
    def f(x, targets, inputs, sizes):
        return F.ctc_loss(x.log_softmax(-1), targets, inputs, sizes)

    x, targets, inputs, sizes = sample()
    check(f, x.detach()[:, 0].requires_grad_(), targets[0], inputs[0], sizes[0])
    check(f, x, targets, inputs, torch.zeros_like(sizes))


def test_what_eager_refuses():
    def f(x, targets, inputs, sizes):
        y = x * 2
        return F.ctc_loss(y.log_softmax(-1), targets, inputs, sizes)

    x, targets, inputs, sizes = sample()
    check(f, x, targets, inputs + T, sizes)
    check(f, x, targets, inputs, sizes + S)
    check(f, x, targets, inputs.float(), sizes)
    check(f, x, targets, inputs[:2], sizes)


def test_a_training_step():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out, self.loss = nn.GRU(8, 16, bidirectional=True), nn.Linear(32, C), nn.CTCLoss()

        def forward(self, x, targets, inputs, sizes):
            return self.loss(self.out(self.rnn(x)[0]).log_softmax(-1), targets, inputs, sizes)

    def train(compiled):
        torch.manual_seed(0)
        model = Reader()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def step(x, *rest):
            optimizer.zero_grad()
            loss = model(x, *rest)
            loss.backward()
            optimizer.step()
            return loss

        step = kiln.compile(step, fullgraph=True) if compiled else step
        losses = []
        for seed in range(5):
            _, *rest = sample(seed)
            losses.append(step(torch.randn(T, N, 8, generator=torch.Generator().manual_seed(seed)), *rest).item())
        return losses, [p.detach() for p in model.parameters()]

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)
