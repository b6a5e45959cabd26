"""Operators of torch.library: which one is called, what it writes to, and how long it lives."""

import gc

import pytest
import torch

import kiln
from kiln.aot import aot_function
from kiln.testing import assert_same

library = torch.library.Library("kiln_test_custom", "DEF")
library.define("double(Tensor x) -> Tensor")
library.define("triple(Tensor x) -> Tensor")
library.define("accumulate_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
library.define("scale(Tensor(a!)[] xs, Tensor y, Tensor(b!)? z, *, float k=2.0) -> (Tensor, Tensor)")
library.define("thrice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
library.impl("double", lambda x: x * 2, "CPU")
library.impl("double", torch.empty_like, "Meta")
library.impl("triple", lambda x: x * 3, "CPU")
library.impl("triple", torch.empty_like, "Meta")
library.impl("accumulate_", lambda x, y: x.add_(y), "CompositeExplicitAutograd")
library.impl("scale", lambda xs, y, z, k=2.0: (torch.empty_like(y), torch.empty_like(y)), "Meta")


def _scale(xs, y, z, k=2.0):
    for x in xs:
        x.mul_(k)
    if z is not None:
        z.copy_(y)
    return y + 1, y * k


def _thrice(x, out):
    return out.copy_(x * 3)


library.impl("scale", _scale, "CPU")
library.impl("thrice", _thrice, "CPU")


@torch.library.custom_op("kiln_test_custom::write_rows", mutates_args={"cache"})
def write_rows(x: torch.Tensor, cache: torch.Tensor, at: int) -> None:
    cache[at : at + x.shape[0]] = x.clone()


@torch.library.custom_op("kiln_test_custom::step", mutates_args={"state"})
def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x)
    return state * 2


@step.register_fake
def _(x, state):
    return torch.empty_like(state)


ops = torch.ops.kiln_test_custom


def of_input(x, y):
    z = ops.accumulate_(x, y)
    return z * 2, z is x


def of_view(x, y):
    ops.accumulate_(x[1:], y[1:])
    return x + 1


def of_transposed(x, y):
    z = x.t()
    ops.accumulate_(z, y.t())
    return x, z


def of_list(x, y):
    a, b = ops.scale([x, y.clone()], y, None)
    return a + b + x


def of_optional(x, y):
    z = torch.zeros_like(y)
    a, b = ops.scale([], y, z, k=3.0)
    return a, b, z


def of_out(x, y):
    return ops.thrice(x, out=y) + 1


def of_made(x, y):
    cache = torch.zeros(8, 4)
    write_rows(x @ y, cache, 2)
    return cache @ x


def of_state(x, y):
    a = step(x, y)
    b = step(a, y)
    return a + b, y.sum()


WRITERS = [of_input, of_view, of_transposed, of_list, of_optional, of_out, of_made, of_state]


@pytest.mark.parametrize("f", WRITERS)
def test_what_an_operator_writes_to(f):
    def run(g):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
        before = x._version, y._version
        result = g(x, y)
        changed = x._version > before[0], y._version > before[1]
        return result, x, y, changed

    compiled = kiln.compile(f, fullgraph=True)
    for _ in range(2):
        assert_same(run(compiled), run(f))


def test_memory_that_is_written_and_read_breaks_the_graph():
    def f(x):
        write_rows(x[:2], x, 1)
        return x

    def made():
        return torch.arange(10.0).reshape(5, 2)

    assert_same(kiln.compile(f)(made()), f(made()))
    assert "shares memory" in str(kiln.explain(f)(made()))
    # In eager the kernel refuses a tensor whose elements lie in one place.
    for g in (lambda x: ops.accumulate_(x, x * 2), kiln.compile(lambda x: ops.accumulate_(x, x * 2))):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            g(torch.ones(1).expand(3))


def test_gradients_go_through_kernels_without_autograd():
    # Eager differentiates what the kernel calls.
    def f(x):
        return ops.double(x) * x

    def run(g):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        g(x).sum().backward()
        return x.grad

    assert_same(run(kiln.compile(f)), run(f))
    assert "no autograd kernel" in str(kiln.explain(f)(torch.ones(2, requires_grad=True)))


def test_a_training_step_with_a_cache_that_is_written():
    def run(compile):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        cache = torch.zeros(8, 4)
        optimizer = torch.optim.Adam(net.parameters())

        def train(x):
            optimizer.zero_grad()
            y = net(x)
            with torch.no_grad():
                write_rows(y, cache, 1)
            loss = (y * cache[1:4]).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        train = compile(train)
        losses = [train(torch.randn(3, 4)) for _ in range(5)]
        return losses, cache, list(net.parameters())

    assert_same(run(lambda f: kiln.compile(f, fullgraph=True)), run(lambda f: f))


def test_a_compiler_of_aten_graphs_sees_no_write():
    targets = []

    def compiler(gm, _):
        targets.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    def f(x):
        y = x * 2
        write_rows(x, y, 0)
        return y + 1

    x = torch.ones(2, 3)
    assert_same(aot_function(f, fw_compiler=compiler)(x), f(x))
    assert any("kiln_functional.kiln_test_custom__write_rows" in t for t in targets)


@pytest.mark.parametrize("kind", ["packet", "overload", "custom_op"])
def test_another_operator_in_the_same_place(kind):
    def pair():
        if kind == "custom_op":
            return [
                torch.library.custom_op(
                    f"kiln_test_custom::by{k}", lambda x, k=k: x * k, mutates_args=(), schema="(Tensor x) -> Tensor"
                )
                for k in (2, 3)
            ]
        packets = [ops.double, ops.triple]
        return packets if kind == "packet" else [p.default for p in packets]

    operators = pair()
    holder = {"op": operators[0]}
    compiled = kiln.compile(lambda x: holder["op"](x) + 1)
    assert_same(compiled(torch.ones(2)), torch.full((2,), 3.0))
    holder["op"] = operators[1]
    assert_same(compiled(torch.ones(2)), torch.full((2,), 4.0))


@torch.library.custom_op("kiln_test_custom::with_count", mutates_args=())
def with_count(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, x.shape[0]


with_count.register_fake(lambda x: (torch.empty_like(x), x.shape[0]))
with_count.register_autograd(lambda ctx, g, _: g * 2)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_operator_that_returns_a_number_breaks_the_graph(requires_grad):
    def f(x):
        y, count = with_count(x + 1)
        return y.sin() * count, count

    found, expected = [], []
    for function, results in ((kiln.compile(f), found), (f, expected)):
        x = torch.ones(3, requires_grad=requires_grad)
        y, count = function(x)
        if requires_grad:
            y.sum().backward()
        results += [y.detach(), count, x.grad]
    assert_same(found, expected)
    with pytest.raises(kiln.exc.GraphBreakError, match="returns other things than tensors"):
        kiln.compile(f, fullgraph=True)(torch.ones(3))


def test_an_operator_that_is_defined_anew():
    # As a notebook does whose cell runs again.
    def define(k):
        @torch.library.custom_op("kiln_test_custom::anew", mutates_args=())
        def anew(x: torch.Tensor) -> torch.Tensor:
            return x * k

        anew.register_fake(torch.empty_like)

        @torch.library.custom_op("kiln_test_custom::anew_written", mutates_args={"x"})
        def anew_written(x: torch.Tensor) -> None:
            x.mul_(k)

        return anew

    held = {}

    def through_ops(x):
        y = torch.ops.kiln_test_custom.anew(x) + 1
        torch.ops.kiln_test_custom.anew_written.default(y)
        return y

    def through_object(x):
        return held["op"](x) + 1

    compiled = kiln.compile(through_ops, fullgraph=True), kiln.compile(through_object, fullgraph=True)
    for k in (2, 3, 4):
        held["op"] = None
        gc.collect()
        held["op"] = define(k)
        for c, f in zip(compiled, (through_ops, through_object), strict=True):
            assert_same(c(torch.ones(3)), f(torch.ones(3)))


@torch.library.custom_op("kiln_test_custom::copy", mutates_args=())
def _copy(x: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _copy_backward(ctx, grad):
    with torch.no_grad():
        ctx.counted.add_(1)
    return grad * 2, None


_copy.register_fake(lambda x, counted: torch.empty_like(x))
_copy.register_autograd(_copy_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "counted", inputs[1]))


@pytest.mark.parametrize("made_inside", [False, True])
def test_backward_that_writes(made_inside):
    """A formula registered for an operator counts its calls in an argument, or in what becomes a result."""

    def f(x, counted):
        if made_inside:
            counted = counted + 1
        return torch.ops.kiln_test_custom.copy(x * 2, counted) * 3, counted

    def run(f):
        x, counted = torch.ones(3, requires_grad=True), torch.zeros(1)
        y, seen = f(x, counted)
        before = seen.clone()
        y.sum().backward()
        return y, before, seen, counted, x.grad

    assert_same(run(kiln.compile(f)), run(f))


@torch.library.custom_op("kiln_test_custom::negated", mutates_args=())
def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


negated.register_fake(torch.empty_like)


@pytest.mark.parametrize("backend", ["kiln", "eager", lambda gm, examples: gm.forward], ids=str)
def test_other_sizes_under_fullgraph(backend):
    """The kernel for fake tensors is asked for the sizes, and is no code of the program's."""
    compiled = kiln.compile(lambda x: negated(x) + 1, fullgraph=True, backend=backend)
    for n in (3, 4, 5, 6):
        assert_same(compiled(torch.ones(n)), torch.zeros(n))


library.define("ticks() -> int")
library.define("note(str what) -> ()")
TICKS, NOTES = [0], []
STATE = 1


def _ticks():
    TICKS[0] += 1
    return TICKS[0]


library.impl("ticks", _ticks, "CompositeExplicitAutograd")
library.impl("note", lambda what: NOTES.append((what, STATE)), "CompositeExplicitAutograd")


def test_operators_that_neither_take_nor_give_tensors():
    def f(x, n):
        global STATE
        STATE = n
        torch.ops.kiln_test_custom.note("before")
        y = x * torch.ops.kiln_test_custom.ticks()
        torch.ops.kiln_test_custom.note.default("after")
        return y + 1

    runs = []
    for call in (f, kiln.compile(f)):
        TICKS[0] = 0
        NOTES.clear()
        runs.append(([call(torch.ones(2), n) for n in range(4)], TICKS[0], list(NOTES)))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1:] == runs[0][1:]
