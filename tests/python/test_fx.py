"""Graphs as torch.fx.GraphModule and back."""

import operator

import numpy as np
import pytest
import torch
from torch.fx.passes.graph_drawer import FxGraphDrawer

import kiln
from kiln import _C
from kiln.testing import assert_same

ATEN = """graph joint {
  input %primals_1 : f32[2, 3]
  input %primals_2 : f32[3]
  input %state : f32[3]
  %add = aten::add.Tensor(%primals_1, %primals_2, 1) : f32[2, 3]
  %add_1 = aten::add.Tensor(%add, 2, 3) : f32[2, 3]
  %max = aten::max.dim(%add_1, 1, False) : (f32[2], i64[2])
  %split = aten::split.Tensor(%add_1, 1, 0) : [f32[1, 3], f32[1, 3]+3]
  %cat = aten::cat([%split#1, %split#0], 0) : f32[2, 3]
  %full = aten::full([3], 0.5, f32, strided, device(cpu), False) : f32[3]
  %mul = aten::mul.Tensor(%full, %state) : f32[3]
  mutate %state = %mul
  return (%cat, %max#0, None, %max#1)
}
"""


def test_aten_graph_runs_and_has_aot_names():
    gm = _C._graph_to_fx(ATEN)
    assert [n.name for n in gm.graph.nodes][:6] == ["primals_1", "primals_2", "state", "add", "add_1", "max_1"]
    add = next(n for n in gm.graph.nodes if n.name == "add")
    assert add.target is torch.ops.aten.add.Tensor and len(add.args) == 2 and not add.kwargs
    add_1 = next(n for n in gm.graph.nodes if n.name == "add_1")
    assert add_1.kwargs == {"alpha": 3}
    assert add.meta["tensor_meta"].shape == (2, 3) and add.meta["val"].device.type == "cpu"
    x, b, state = torch.randn(2, 3), torch.randn(3), torch.ones(3)
    cat, values, none, indices = gm(x, b, state)
    want = x + b + 2 * 3
    assert none is None
    assert torch.equal(cat, want.flip(0)) and torch.equal(values, want.max(1).values)
    assert torch.equal(indices, want.max(1).indices) and torch.equal(state, torch.full((3,), 0.5))


def test_aten_graph_round_trips():
    gm = _C._graph_to_fx(ATEN)
    text = _C._fx_to_graph(gm, [torch.empty(2, 3), torch.empty(3), torch.empty(3)])
    assert text.replace("max_1", "max") == ATEN.replace("graph joint", "graph graph")
    # Without metadata on the nodes the shape rules give the same.
    for n in gm.graph.nodes:
        n.meta.clear()
    assert _C._fx_to_graph(gm, [torch.empty(2, 3), torch.empty(3), torch.empty(3)]) == text


def test_changed_module_comes_back():
    gm = _C._graph_to_fx(ATEN)
    add = next(n for n in gm.graph.nodes if n.name == "add")
    add.target = torch.ops.aten.sub.Tensor
    gm.recompile()
    text = _C._fx_to_graph(gm, [torch.empty(2, 3), torch.empty(3), torch.empty(3)])
    assert "%add = aten::sub.Tensor(%primals_1, %primals_2, 1) : f32[2, 3]" in text


def test_foreign_call_is_refused():
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    from kiln.exc import Unsupported

    with pytest.raises(Unsupported, match="relu"):
        _C._fx_to_graph(gm, [torch.empty(2)])


TORCH = """graph g {
  input %l_x_ : f32[2, 4] grad
  input %l_w_ : f32[3, 4]
  %linear = target::0(%l_x_, %l_w_) : f32[2, 3]
  %relu = target::1(%linear, inplace=False) : f32[2, 3]
  %view = target::2(%relu, -1) : f32[6]
  %getitem = target::3(%view, ["tuple", ["slice", None, None, 2]]) : f32[3]<2>
  %chunk = target::4(%getitem, 3) : [f32[1], f32[1]+2, f32[1]+4]
  %add = operator.add(%chunk#0, %chunk#2) : f32[1]
  %size = method.mul(%add, 2.0) : f32[1]
  return (%size, %relu)
}
"""


def test_torch_level_graph_reads_as_users_expect(capsys):
    targets = [
        torch._C._nn.linear,
        torch.nn.functional.relu,
        torch.Tensor.view,
        operator.getitem,
        torch.chunk,
    ]
    gm = _C._graph_to_fx(TORCH, targets)
    kinds = {n.name: (n.op, n.target) for n in gm.graph.nodes}
    assert kinds["linear"] == ("call_function", torch._C._nn.linear)
    assert kinds["relu"] == ("call_function", torch.nn.functional.relu)
    assert kinds["view"] == ("call_method", "view")
    assert kinds["add"] == ("call_function", operator.add)
    assert kinds["size"] == ("call_method", "mul")
    assert kinds["output"][0] == "output"
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    out, relu = gm(x, w)
    want = torch.relu(x @ w.t())
    torch.testing.assert_close(relu, want)
    flat = want.view(-1)[::2]
    torch.testing.assert_close(out, (flat[:1] + flat[2:]) * 2.0)
    gm.graph.print_tabular()
    text = gm.print_readable()
    printed = capsys.readouterr().out
    assert "l_x_" in printed and "torch._C._nn.linear(l_x_, l_w_)" in text
    dot = FxGraphDrawer(gm, "g").get_dot_graph().to_string()
    assert "linear" in dot and "float32" in dot
    gm.graph.lint()


def no_grad_in_place(x, w):
    with torch.no_grad():
        w.add_(x)
    return w * 2


def no_grad_value(x, w):
    with torch.no_grad():
        y = x * w
        with torch.enable_grad():
            z = w * 3
    return y + z + w * 0


def grad_left_off(x, w):
    y = x * w
    torch.set_grad_enabled(False)
    try:
        z = x * w
    finally:
        torch.set_grad_enabled(True)
    return y + z


def autocast_part(x, w):
    y = x.view(1, 2) @ w.view(2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = x.view(1, 2) @ w.view(2, 1)
        with torch.autocast("cpu", enabled=False):
            u = x.view(1, 2) @ w.view(2, 1)
    return y, z, u


def calls_backward(x, w):
    w.grad = None
    loss = (w * x).sum()
    loss.backward()
    return loss.detach() * 2


def takes_gradient(x, w):
    (g,) = torch.autograd.grad((w * w * x).sum(), w)
    return g * w


def distances(x, w):
    return torch.cdist(x[None], w[None]), torch.einsum("i,j->ij", x, w), torch.norm(x * w)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "program",
    [no_grad_in_place, no_grad_value, grad_left_off, autocast_part, calls_backward, takes_gradient, distances],
)
def test_modes_and_gradients_for_backends(program, backend):
    def run(function):
        x, w = torch.tensor([2.0, 3.0]), torch.nn.Parameter(torch.tensor([1.0, 5.0]))
        out = []
        for _ in range(2):
            result = function(x, w)
            roots = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
            if roots:
                sum(r.sum().float() for r in roots).backward()
            out += [result, w.grad, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        return out

    assert_same(run(program), run(kiln.compile(program, backend=backend)))


def test_a_failing_graph_leaves_no_mode_behind():
    def backend(gm, example_inputs):
        def run(*args):
            gm(*args)
            torch.set_grad_enabled(False)
            raise RuntimeError("no")

        return run

    with pytest.raises(RuntimeError, match="no"):
        kiln.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert torch.is_grad_enabled()


class Wrapped:
    """Stands for a tensor: torch's functions ask its class what they are to do."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return args[0].tensor.max() + 1


def numbers_changed_in_place(x):
    total, product, quotient, power = 0, 1, 2.0, 3
    for _ in range(2):
        total += x.sum()
    product *= x
    quotient /= x
    power **= x
    bits = 5
    bits &= x.int()
    return total, product, quotient, power, bits


def types_as_dtypes(x):
    return x.to(bool), x.to(float), x.to(int), x.type(torch.DoubleTensor), x.type("torch.HalfTensor")


def constants(x):
    made = torch.tensor([1.0, 2.0])
    result = torch.tensor([3, 4])
    return x + made, x * torch.tensor(2.5), result, torch.where(x > 1, 1, 2), x.new_tensor([True, False])


def objects(x):
    generator = torch.Generator().manual_seed(3)
    return torch.max(Wrapped(x)), torch.rand(2, generator=generator) + x


def scalars_of_numpy(x):
    half = np.float64(0.5)
    return (
        x * torch.tensor([half, 1.0]),
        x * torch.tensor([[np.float32(2)], [half]]),
        torch.tensor([np.int32(1), 2]) + x,
    )


PROGRAMS = [numbers_changed_in_place, types_as_dtypes, constants, objects, scalars_of_numpy]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "print"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_arguments_that_are_no_tensors(program, backend, capsys):
    compiled = kiln.compile(program, backend=backend)
    for _ in range(2):
        x = torch.tensor([1.0, 3.0])
        assert_same(program(x), compiled(x))
        # A result is the caller's: what is written to it must not be there in the next call.
        compiled(x)[2 if program is constants else 0].zero_()


def test_constant_of_an_aot_graph_round_trips():
    def program(x):
        return x * torch.tensor([1.0, 2.0])

    texts = []

    def compiler(gm, example_inputs):
        kinds = [n.op for n in gm.graph.nodes]
        assert kinds == ["placeholder", "get_attr", "call_function", "call_function", "output"], kinds
        texts.append(_C._fx_to_graph(gm, [torch.empty(2)]))
        return kiln.aot.make_boxed_func(gm.forward)

    compiled = kiln.aot.aot_function(program, compiler)
    x = torch.tensor([3.0, 4.0])
    assert_same(compiled(x), program(x))
    assert texts == [
        """graph graph {
  input %primals_1 : f32[2]
  %_tensor_constant0 = kiln::tensor_constant([1.0, 2.0], [2], f32) : f32[2]
  %mul = aten::mul.Tensor(%primals_1, %_tensor_constant0) : f32[2]
  return (%mul)
}
"""
    ]


class Scaled:
    """Operators in Python, beside tensors."""

    def __init__(self, t):
        self.t = t

    def __iadd__(self, x):
        self.t = self.t + x * 2
        return self

    def __rmul__(self, x):
        return x + 100

    def __getitem__(self, i):
        return i * 3

    def __eq__(self, x):
        return x > self.t

    def __matmul__(self, x):
        return x.sum()


def test_operators_of_classes_are_what_they_call(capsys):
    def f(x):
        s = Scaled(0.5)
        s += x
        return s.t, x * s, s[x], x == Scaled(0.0), s @ x

    x = torch.tensor([1.0, -2.0, 3.0])
    seen = []

    def backend(gm, example_inputs):
        seen.extend(n.name for n in gm.graph.nodes)
        return gm.forward

    assert_same(f(x), kiln.compile(f, backend=backend)(x))
    assert seen == ["l_x_", "mul", "add", "add_1", "mul_1", "gt", "sum_1", "output"]
    assert kiln.explain(f)(x).graph_count == 1


def test_complex_numbers_reach_a_backend():
    codes = []

    def backend(gm, example_inputs):
        codes.append(gm.code)
        return gm.forward

    x = torch.ones(2)
    assert torch.equal(kiln.compile(lambda x: torch.full((2,), 3j) + x * (1 + 2j), backend=backend)(x), x + (2j + 3j))
    assert "(1+2j)" in codes[0]
