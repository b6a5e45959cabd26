"""Kernels as C++ source: run by the system's compiler (emitter=cpp), and printed (KILN_LOGS=output_code)."""

import shutil

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.exc import UserError
from kiln.testing import assert_same

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


def chain(x, w):
    return F.softmax(F.layer_norm(F.gelu(x) @ w, (16,)), -1).cumsum(-1)


def sums_and_places(x):
    return x.var(0), x.argmax(1), x.max(), (x > 0).sum(), x.prod(-1), torch.logsumexp(x, 0), x.std()


def gathers(x, i):
    return x[i], x.index_add(0, i, x[: len(i)]), F.embedding(i, x), torch.where(x > 0, x, i[0])


def halves(x):
    y = x.bfloat16() * 3 + 1
    return y, y.float().sum(-1).half(), (y == y.round()).any(), y.to(torch.int16) // 7


def pools(x):
    return (
        F.max_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 2),
        F.interpolate(x, scale_factor=2),
        F.pad(x, (1, 2, 0, 1), mode="reflect"),
    )


CASES = {
    "chain": (chain, lambda: (torch.randn(6, 32), torch.randn(32, 16))),
    "sums_and_places": (sums_and_places, lambda: (torch.randn(70, 45),)),
    "gathers": (gathers, lambda: (torch.randn(9, 4), torch.tensor([3, 0, 3]))),
    "halves": (halves, lambda: (torch.randn(5, 33),)),
    "pools": (pools, lambda: (torch.randn(2, 3, 8, 8),)),
    "large": (lambda x: (x * 2 + x.sin(), x.sum(), x.t() + 1), lambda: (torch.randn(300, 400),)),
}


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_as_in_eager(case):
    f, make = CASES[case]
    torch.manual_seed(0)
    args = make()
    compiled = kiln.compile(f, options={"emitter": "cpp"}, fullgraph=True)
    assert_same(compiled(*args), f(*args), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_training_step():
    def losses(step_of):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
        )
        head = torch.nn.Linear(8 * 36, 5)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(F.dropout(model(x), 0.1)), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = step_of(step)
        return [step(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])).item() for _ in range(5)]

    got = losses(lambda f: kiln.compile(f, options={"emitter": "cpp"}))
    assert got == pytest.approx(losses(lambda f: f), rel=1e-4)


@needs_compiler
def test_errors_are_those_of_eager():
    x, i = torch.randn(4), torch.tensor([1, 9])
    compiled = kiln.compile(lambda x, i: x[i] * 2, options={"emitter": "cpp"})
    with pytest.raises(IndexError, match="out of"):
        compiled(x, i)
    a, zero = torch.tensor([4, 2]), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        kiln.compile(lambda a, b: a // b, options={"emitter": "cpp"})(a, zero)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    f = kiln.compile(lambda x: x * 2 + 1, options={"emitter": "cpp"})
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler"):
        assert torch.equal(f(x), x * 2 + 1)


def test_an_unknown_emitter():
    f = kiln.compile(lambda x: x * 2 + 1, options={"emitter": "fortran"})
    with pytest.raises(UserError, match="'cpp' or 'triton'"):
        f(torch.ones(3))


def test_output_code_is_cpp_and_llvm_ir_is_apart(capfd):
    kiln.set_logs("output_code")
    try:
        kiln.compile(lambda x: (x * 2.5).relu())(torch.ones(64))
    finally:
        kiln.set_logs("")
    text = capfd.readouterr().err
    assert "#pragma omp simd" in text and " * 2.5f;" in text and "define" not in text
    kiln.set_logs("llvm_ir")
    try:
        kiln.reset()
        kiln.compile(lambda x: (x * 2.5).relu())(torch.ones(64))
    finally:
        kiln.set_logs("")
    assert "define i32 @" in capfd.readouterr().err
