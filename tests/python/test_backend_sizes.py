"""Sizes that are left open in graphs for custom backends: placeholders of their own, one graph for many sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.testing import CompileCounter, CompileCounterWithBackend, assert_same

SIZES = (8, 7, 12, 4, 3, 9, 5)


def check(f, make, sizes=SIZES, backend="eager", graphs=1, **options):
    """Equals eager for each size, with so many graphs; returns the counter."""
    counter = CompileCounterWithBackend(backend)
    compiled = kiln.compile(f, backend=counter, **{"dynamic": True, **options})
    for n in sizes:
        arguments = make(n)
        expected = f(*copy.deepcopy(arguments))
        for _ in range(2):
            assert_same(compiled(*copy.deepcopy(arguments)), expected)
    assert counter.frame_count == graphs
    return counter


def rows(n):
    return (torch.randn(n, 6),)


def test_sizes_are_placeholders_before_their_tensor():
    seen = []

    def backend(gm, example_inputs):
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        seen.extend(zip([n.name for n in placeholders], example_inputs, strict=True))
        assert all(n.meta["val"] is not None for n in placeholders)
        return gm.forward

    compiled = kiln.compile(lambda x, y: x.view(-1) + y, backend=backend)
    x, y = torch.randn(3, 4), torch.randn(1)
    kiln.mark_dynamic(x, 0)
    assert_same(compiled(x, y), x.view(-1) + y)
    names, values = zip(*seen, strict=True)
    assert names[1:] == ("l_x_", "l_y_") and names[0].startswith("s")
    assert isinstance(values[0], torch.SymInt) and [tuple(v.shape) for v in values[1:]] == [(3, 4), (1,)]
    other = torch.randn(5, 4)
    assert_same(compiled(other, y), other.view(-1) + y)
    assert len(seen) == 3


def test_what_is_computed_of_sizes_is_computed_by_the_graph():
    def f(x):
        n, m = x.shape
        a = x.view(n * m, 1).expand(n * m, 2)[: n + 3 * m - 1]
        b = torch.arange(n // 2 + 1) * (n % 4)
        c = torch.zeros(torch.sym_min(n, 5), torch.sym_max(m, n) - n)
        return a, b, c, torch.cat([x, x])[n:], x.sum() / n

    counter = check(f, rows)
    targets = [str(n.target) for n in counter.graphs[0].graph.nodes]
    assert any("floordiv" in t for t in targets) and any("mod" in t for t in targets)


def test_sizes_of_what_the_graph_computes():
    def f(x, w):
        a = F.conv2d(x, w, padding=1)
        u = F.interpolate(F.max_pool2d(a, 2), size=a.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat([a, u], 1).mean((2, 3)), u.shape[2] + 1, u.view(-1, u.shape[-1] * u.shape[-2]).sum(1)

    check(f, lambda n: (torch.randn(2, 3, 2 * n, 2 * n + 2), torch.randn(3, 3, 3, 3)))


def test_a_size_that_is_asked_for_before_a_write():
    def f(x):
        y = x * 2
        n = y.shape[0]
        y.add_(1)
        return y.view(n * 2, 3), y.view(y.shape[0] * 3, 2)

    check(f, rows)


def test_functions_that_are_one_node():
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    for p in layer.parameters():
        p.requires_grad_(False)
    check(layer, lambda n: (torch.randn(2, n, 6),), graphs=1)


def test_the_second_size_opens_it():
    check(lambda x: x.view(x.shape[0] * 2, 3).t(), rows, dynamic=None, graphs=2)
    check(lambda x: x.view(x.shape[0] * 2, 3).t(), rows, dynamic=False, graphs=len(SIZES))


def test_ints_of_the_call():
    def f(x, n):
        return x[n:] * n, x.narrow(0, n, 2)

    counter = check(f, lambda n: (torch.randn(12, 2), n - 2), graphs=2)
    assert isinstance(counter.graphs[1].graph.find_nodes(op="placeholder")[-1].meta["val"], torch.SymInt)


def test_conditions_on_sizes_choose_among_graphs():
    check(lambda x: x * 2 if x.shape[0] > 6 else x - 1, rows, graphs=2)

    def f(x):  # of a size that only the graph's own values tell
        y = torch.cat([x, x])
        return y.sum() if y.size(0) > 12 else y * 3

    check(f, rows, graphs=2)


def test_sizes_that_a_backend_looks_at_are_conditions():
    kinds = []

    def backend(gm, example_inputs):
        kinds.append(bool(example_inputs[0] > 6))
        scale = 10 if kinds[-1] else 1
        return lambda *inputs: tuple(o * scale for o in gm.forward(*inputs))

    compiled = kiln.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for n in SIZES:
        (x,) = rows(n)
        assert_same(compiled(x), (x + 1) * (10 if n > 6 else 1))
    assert kinds == [True, False]


def test_a_backend_that_takes_tensors_alone():
    counter = CompileCounter()

    def backend(gm, example_inputs):
        assert all(isinstance(v, torch.Tensor) for v in example_inputs)
        return counter(gm, example_inputs)

    def f(x):
        return x.view(-1) * x.shape[0]

    compiled = kiln.compile(f, backend=backend)
    for n in SIZES[:4]:
        assert_same(compiled(*(given := rows(n))), f(*given))
    assert counter.frame_count == 4
    with pytest.raises(kiln.exc.BackendError, match="AssertionError"):
        kiln.compile(f, backend=backend, dynamic=True)(*rows(3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training(backend):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    other = copy.deepcopy(net)

    def loss(net, x):
        return (net(x).softmax(-1).view(x.shape[0] * 3)).square().sum() / x.size(0)

    counter = CompileCounterWithBackend(backend)
    compiled = kiln.compile(loss, backend=counter, dynamic=True, fullgraph=True)
    for n in SIZES:
        (x,) = rows(n)
        a, b = loss(net, x), compiled(other, x)
        a.backward()
        b.backward()
        assert_same(b, a)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert_same(q.grad, p.grad)
    for p, q in zip(net.buffers(), other.buffers(), strict=True):
        assert_same(q, p)
    assert counter.frame_count == 1


def test_aot_compilers_are_called_for_each_size():
    shapes = []

    def compiler(gm, example_inputs):
        shapes.append(tuple(example_inputs[0].shape))
        return kiln.aot.make_boxed_func(gm.forward)

    def backend(gm, example_inputs):
        return kiln.aot.aot_module_simplified(gm, example_inputs, fw_compiler=compiler)

    check(lambda x: x.view(x.shape[0] * 2, 3).tanh(), rows, backend=backend)
    assert shapes == [(n, 6) for n in SIZES]


def test_a_profile_of_shapes_around_a_first_call():
    # The sizes of a graph are tried on stand-ins, which a profiler that asks for shapes cannot look into.
    def f(x, y):
        return torch.cat([x, y]) + 1

    x, y = torch.randn(4, 3), torch.randn(2, 3)
    compiled = kiln.compile(f, dynamic=True, backend="eager")
    with torch.profiler.profile(record_shapes=True) as profile:
        assert_same(compiled(x, y), f(x, y))
    assert [e.name for e in profile.events()].count("aten::cat") == 2  # the two runs above
