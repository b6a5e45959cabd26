"""Tensors that the program makes of numbers, and what depends on them alone: known during the capture."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check


def test_new_tensor():
    check(
        lambda x: (x * x.new_tensor(2.5) + x.new_tensor([1, 2, 3]), x.new_tensor([1], dtype=torch.int64)),
        torch.ones(2, 3),
    )
    check(lambda x: x.long().new_tensor(3.7) + torch.Tensor.new_tensor(x, [[1.0, 2.0, 3.0]]), torch.ones(2, 3))
    check(lambda x: (x.new_tensor([1.0, 2.0, 3.0], requires_grad=True) * x).sum().backward(), torch.ones(2, 3))
    with pytest.raises(TypeError):
        kiln.compile(lambda x: x.new_tensor())(torch.ones(1))


def test_classes_of_tensors():
    def f(x):
        sized = torch.FloatTensor(2, 3)
        return (
            x + torch.Tensor([1, 2, 3]),
            torch.IntTensor([x.shape[0]])[0] + 1,
            torch.LongTensor([[1.7, 2], [3, 4]]),
            torch.Tensor((1, 2)),
            torch.BoolTensor([0, 2]),
            sized.shape,
            torch.zeros_like(torch.Tensor(x.shape)),
            torch.Tensor(),
            torch.DoubleTensor([]),
        )

    check(f, torch.ones(2, 3), fullgraph=True)
    try:
        torch.set_default_dtype(torch.float64)
        check(f, torch.ones(2, 3), fullgraph=True)
    finally:
        torch.set_default_dtype(torch.float32)
    check(lambda x: (torch.Tensor(x) * 2, torch.FloatTensor(x)), torch.ones(2, 3), fullgraph=True)
    check(lambda x: torch.Tensor([x.sum(), 2.0]), torch.ones(2, 3), fullgraph=True)
    for bad in (lambda: torch.Tensor(3.0), lambda: torch.Tensor(["a"]), lambda: torch.IntTensor([[1], [2, 3]])):
        with pytest.raises((TypeError, ValueError)) as expected:
            bad()
        with pytest.raises(expected.type) as actual:
            kiln.compile(bad)()
        assert str(actual.value) == str(expected.value)


def test_new():
    def f(x):
        same = x.new(x)
        same += 1
        return (
            x.new(2, 3).zero_() + x,
            x.new(x.size()).fill_(2),
            x.new().shape,
            x.new([1, x.sum(), 2]),
            torch.Tensor.new(x.long(), (4, 5)),
            same,
        )

    check(f, torch.ones(2, 3), fullgraph=True)
    check(lambda x: x.new(2, device="cpu").zero_() + x.sum(), torch.ones(2, 3))


def test_variables():
    def f(x):
        v = torch.autograd.Variable(x)
        w = torch.autograd.Variable(torch.zeros(3), requires_grad=True)
        ((x * v).sum() + (w * x).sum()).backward()
        return w.grad.clone(), isinstance(v, torch.autograd.Variable), v.requires_grad

    check(f, torch.ones(2, 3, requires_grad=True), fullgraph=True)
    check(lambda x: torch.autograd.Variable(x, volatile=True) + 1, torch.ones(2, 3))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.tensor([x.sum(), x.mean(), 1.0]),
        lambda x: torch.tensor([(x > 0).sum(), 2]),
        lambda x: torch.tensor(((x > 0).sum(), 2.5)),
        lambda x: torch.tensor([x.sum() > 0, True]),
        lambda x: torch.tensor([[x.sum(), x.mean()], [1, 2]], dtype=torch.float64),
        lambda x: torch.tensor([x.sum(), 0.1, 2**60 + 1], dtype=torch.float64) - 0.1,
        lambda x: torch.tensor([x.sum().long(), 2**60 + 1], dtype=torch.int64) - 2**60,
        lambda x: x.double().new_tensor([x.sum(), 0.1]) - 0.1,
        lambda x: x.new_tensor([x.sum().double(), 3]),
        lambda x: torch.Tensor.new_tensor(x, [x.sum().double(), 3]),
    ],
)
def test_tensors_of_lists_of_tensors(f):
    check(f, torch.arange(6.0, requires_grad=True).view(2, 3), fullgraph=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.tensor(x.t()),
        lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True) * 2,
        lambda x: x.new_tensor(x.double()),
    ],
)
def test_copies_of_tensors_warn_as_in_eager(f):
    seen = []
    for function in (f, kiln.compile(f, fullgraph=True)):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as record:
                warnings.simplefilter("always")
                function(torch.ones(2, 3))
            seen.append([(str(w.message), w.category, w.filename, w.lineno) for w in record])
    assert len(seen[0]) == 1 and seen == seen[:1] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(f, torch.arange(6.0, requires_grad=True).view(2, 3))


def test_isinstance_of_classes_of_dtypes():
    def f(x):
        return x + 1, [
            isinstance(x, torch.FloatTensor),
            isinstance(x, torch.LongTensor),
            isinstance(x.long(), torch.LongTensor),
            isinstance(x, (torch.LongTensor, torch.FloatTensor)),
            isinstance(x, (torch.LongTensor, torch.DoubleTensor)),
            isinstance(x, (torch.LongTensor, torch.Tensor)),
            isinstance(x, torch.cuda.FloatTensor),
            isinstance(x, torch.sparse.FloatTensor),
            isinstance(1, torch.FloatTensor),
        ]

    check(f, torch.ones(2, 3), fullgraph=True)


def sizes_of_constants(x):
    n = torch.div(torch.tensor(5), 2, rounding_mode="trunc")
    k = torch.tensor([1, 2]).sum()
    y = F.pad(x, (0, torch.tensor(2)))
    if torch.tensor(3) > n:
        y = y + 1
    return y.repeat(int(k), 1), x.reshape(-1)[:n], torch.arange(10).max().item(), y * float(torch.full((), 0.5))


def written_constants(x):
    t = torch.zeros(3, dtype=torch.int64)
    t[1] = 4
    t.add_(1)
    view = t[:2]
    view += 1
    return x[: t[1] - 5], t, int(view[0])


@pytest.mark.parametrize("f", [sizes_of_constants, written_constants])
def test_what_depends_on_constants_alone_is_known(f):
    check(f, torch.ones(3, 2), fullgraph=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: torch.tensor([0, 1]),
        torch.unique,
        lambda t: t,
    ],
    ids=["constants", "unique", "small integers"],
)
def test_branches_and_numbers_of_what_is_known(make):
    def f(t):
        u = make(t)
        taken = []
        for v in ((u < 0).any(), (u >= 0).all(), u.sum() - 1, u.max().double(), (u * 0).sum()):
            if v:
                taken.append("if")
            if not v:
                taken.append("if not")
            taken += [v and 2, bool(v), int(v), float(v), v.item(), v.__float__(), [3, 4][int(v.bool())], f"{v.item()}"]
        assert not (u > 1).any() and (u <= 1).all()
        return t + 1, [(type(v).__name__, v) for v in taken if not isinstance(v, torch.Tensor)]

    check(f, torch.tensor([0, 1, 0]))


def test_what_depends_on_more_than_constants_is_not_known():
    def f(x):
        n = torch.zeros((), dtype=torch.int64)
        n += x
        return torch.ones(n)

    compiled = kiln.compile(f)
    for n in (2, 3, 2):
        assert compiled(torch.tensor(n)).shape == (n,)
    compiled = kiln.compile(lambda: torch.ones(int(torch.randint(1, 9, ()))))
    torch.manual_seed(0)
    expected = [int(torch.randint(1, 9, ())) for _ in range(5)]
    torch.manual_seed(0)
    assert [compiled().shape[0] for _ in range(5)] == expected


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.full((3,), x.sum().item()),
        lambda x: torch.full((3,), x.sum()) * x[0],
        lambda x: torch.full((3,), x.sum(), dtype=torch.int64),
        lambda x: torch.full(size=(3,), fill_value=x.long().sum()),
        lambda x: torch.full((3,), x.long().sum().item(), dtype=torch.float64),
        lambda x: torch.full((2, 2), x.sum() > 1),
        lambda x: (torch.full_like(x, x.sum()), torch.full_like(x, x.sum().item(), dtype=torch.int64)),
        lambda x: (x.new_full((2,), x.sum()), x.new_full((2,), x.sum().item())),
        lambda x: torch.Tensor.new_full(x, (2,), fill_value=x.sum(), dtype=torch.float64),
        lambda x: (x.masked_fill(x > 0, x.sum().item()), x.double().masked_fill_(x > 0, x.sum().item())),
        lambda x: [make((2,), x.sum()) for make in (x.new_full,)],
        lambda x: torch.full((2,), x.double().sum()),
        lambda x: (torch.full((2,), x.sum(), requires_grad=True) * x.sum()).sum(),
    ],
)
def test_full_of_a_value(f):
    x = torch.linspace(-1, 2, 6).view(2, 3)
    check(f, x, fullgraph=True)
    check(f, x.requires_grad_())  # eager refuses tensors that require gradients


def test_full_of_sizes_and_of_what_breaks():
    x = torch.arange(6)
    check(lambda x: torch.full((x.max().item(), 2), 1.5), x)
    check(lambda x: torch.full((2,), x.max().item(), out=torch.empty(2)), x)
    check(lambda x: torch.full((2,), x.sum() * 1j), x)
    check(lambda x: torch.full((2,), x[:1]), x)


def test_operators_of_numbers_alone():
    """torch.div(8, 4) is a tensor, and sizes are computed so."""

    def f(x):
        rows = torch.div(x.size(0), 2, rounding_mode="trunc")
        more = torch.add(rows, 1) - 1
        return x.view(rows, -1), x.new_zeros((more + 1, 2)), x * torch.div(8, 3), torch.div(7, 2)

    check(f, torch.linspace(-1, 2, 8).view(4, 2), fullgraph=True)


def test_checks_of_floats_that_are_constants():
    """Constants of floats decide branches as integers do, at any length that is looked at for masks."""

    def normal(x):
        prior = torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3))
        return prior.log_prob(x)

    def bias(x):
        mask = (1.0 - F.pad(torch.ones(2, 5), (0, 507))) * torch.finfo(x.dtype).min
        return x + 1 if (mask < 0).flatten().any().item() else x - 1

    def equal(x):
        q = torch.tensor([0.2, 0.5])
        return x + 1 if torch.equal(q, q * 1) else x

    for f in (normal, bias, equal):
        check(f, torch.linspace(-1, 1, 6).reshape(2, 3), fullgraph=True)
