"""kiln.compiled_autograd: backwards as graphs, each compared with what PyTorch's engine does."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import kiln
from kiln import compiled_autograd
from kiln.exc import BackendError


@pytest.fixture(autouse=True)
def fresh():
    compiled_autograd.reset()
    kiln.reset()


class Compiler:
    """Counts the graphs that it is given, and returns them as they are, or compiled."""

    def __init__(self, compile=None):
        self.compile = compile
        self.graphs = []

    def __call__(self, gm):
        self.graphs.append(gm)
        return self.compile(gm) if self.compile else gm

    def targets(self):
        return [str(n.target) for n in self.graphs[-1].graph.nodes if n.op == "call_function"]


COMPILERS = {"traced": None, "kiln": kiln.compile}


@pytest.fixture(params=COMPILERS)
def compiler(request):
    return Compiler(COMPILERS[request.param])


def same(program, compiler, calls=3, graphs=1, **tolerance):
    """Compares program(backward) -> list of tensors with the engine's, call by call."""
    torch.manual_seed(0)
    want = [program(torch.autograd.backward) for _ in range(calls)]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled_autograd.enable(compiler):
            got = [program(torch.autograd.backward) for _ in range(calls)]
    for expected, actual in zip(want, got, strict=True):
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, **tolerance)
                assert a.stride() == b.stride() and a.requires_grad == b.requires_grad
    assert len(compiler.graphs) == graphs


def gradients(module):
    return [p.grad for p in module.parameters()]


def test_one_graph_for_backwards_of_one_kind(compiler):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))

    def program(backward):
        model.zero_grad()
        backward(F.cross_entropy(model(torch.randn(5, 8)), torch.tensor([0, 1, 2, 3, 0])))
        return gradients(model)

    same(program, compiler)
    assert "aten.native_layer_norm_backward.default" in compiler.targets()


def test_gradients_are_added_to_those_that_are_there(compiler):
    model = torch.nn.Linear(4, 4)

    def program(backward):
        model.zero_grad()
        seen = []
        for _ in range(3):
            backward(model(torch.randn(2, 4)).sum())
            seen += [g.clone() for g in gradients(model)]
        return seen

    same(program, compiler, graphs=2)


def test_a_gradient_has_memory_of_its_own(compiler):
    def program(backward):
        a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        backward(((a + b.t()) * 2).sum() + a.sum())
        a.grad.add_(1)
        return [a.grad, b.grad]

    same(program, compiler)


def test_views_that_are_written(compiler):
    def program(backward):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        y = x * 2
        y[0] = w
        y[:, 1].mul_(3)
        y.t()[2].copy_(w.exp())
        backward((y * y).sum())
        return [x.grad, w.grad]

    same(program, compiler)


def test_hooks_of_every_kind(compiler):
    def program(backward):
        seen = []
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        y = x @ w
        y.register_hook(lambda g: g * 2)
        x.register_hook(lambda g: g + 1)
        z = y.relu()
        z.grad_fn.register_hook(lambda outputs, inputs: (outputs[0] * 3,))
        z.grad_fn.register_prehook(lambda grads: (grads[0] + 0.5,))
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        backward((z * z).sum())
        return [x.grad, w.grad, *seen]

    same(program, compiler)


def test_retain_grad(compiler):
    def program(backward):
        x = torch.randn(4, requires_grad=True)
        y = x.sin()
        y.retain_grad()
        backward((y * y).sum())
        return [x.grad, y.grad]

    same(program, compiler)


def test_hooks_that_change_from_call_to_call(compiler):
    scale = iter(range(1, 100))

    def program(backward):
        x, k = torch.ones(3, requires_grad=True), next(scale)
        y = x * 2
        y.register_hook(lambda g: g * k)
        backward(y.sum())
        return [x.grad / k]

    same(program, compiler)


def test_an_optimizer_in_hooks_of_parameters(compiler):
    def program(backward):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            backward(model(torch.ones(2, 4)).pow(2).sum())
        return [*model.parameters(), *gradients(model)]

    same(program, compiler, calls=1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor + y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor, None, None


def test_functions_of_python(compiler):
    def program(backward):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        backward(Scaled.apply(x, y, 3.0).sin().sum())
        return [x.grad, y.grad]

    same(program, compiler)
    assert any("call_function" in t for t in compiler.targets())


class Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, y, z):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * factor * y + z

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.factor * y, None, grad * ctx.factor * x, None


@pytest.mark.parametrize("needs_grad", [True, False])
def test_functions_with_numbers_between_tensors(compiler, needs_grad):
    def program(backward):
        x, y = torch.randn(3, requires_grad=needs_grad), torch.randn(3, requires_grad=True)
        backward(Between.apply(x, 3.0, y, torch.ones(3)).sin().sum())
        return [x.grad, y.grad]

    same(program, compiler)


class Odd(torch.autograd.Function):
    """Returns gradients of another dtype, another layout, and another size than its inputs."""

    @staticmethod
    def forward(ctx, x, y, z):
        return x * 2 + y + z

    @staticmethod
    def backward(ctx, grad):
        return grad.double() * 2, (grad * 1).t().contiguous().t(), grad


def test_gradients_of_functions_are_made_to_fit(compiler):
    def program(backward):
        x, y, z = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True), torch.randn(4)
        z.requires_grad_()
        backward((Odd.apply(x * 1, (y * 2).view(3, 4), z) ** 2).sum())
        return [x.grad, y.grad, z.grad]

    same(program, compiler)


def test_hooks_that_return_another_layout(compiler):
    def program(backward):
        x = torch.randn(3, 4, requires_grad=True)
        y = (x * 2).view(12)
        z = y.view(3, 4)
        z.register_hook(lambda g: (g * 3).t().contiguous().t())
        backward((z * z).sum())
        return [x.grad]

    same(program, compiler)


def test_a_function_that_runs_a_backward(compiler):
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            z = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward((z * z).sum())
            return grad * z.grad

    def program(backward):
        x = torch.randn(3, requires_grad=True)
        backward(Inner.apply(x).sum())
        return [x.grad]

    same(program, compiler, calls=2, graphs=2)


@pytest.mark.parametrize("saved_by", ["numbers", "0-dim"])
def test_numbers_keep_their_weight_in_type_promotion(compiler, saved_by):
    def program(backward):
        x = torch.randn((3,) if saved_by == "numbers" else (), requires_grad=True)
        y = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        backward((x * 2.5 / 3).sum() + (y * 1.001).sum().float())
        return [x.grad, y.grad]

    same(program, compiler)


def test_numbers_that_change_are_no_new_graphs(compiler):
    factors = iter([float(i) for i in range(1, 13)] * 2)

    def program(backward):
        x = torch.ones(3, requires_grad=True)
        backward((x * next(factors)).sum())
        return [x.grad]

    same(program, compiler, calls=12)


def test_complex_numbers(compiler):
    def program(backward):
        x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
        backward((x * (1 + 2j)).abs().sum())
        return [x.grad]

    same(program, compiler)


def test_autograd_grad(compiler):
    def program(backward):
        x, y, unused = (torch.randn(3, requires_grad=True) for _ in range(3))
        z = x * y
        return [
            *torch.autograd.grad(z.sum(), [x, y], retain_graph=True),
            *torch.autograd.grad(z.sum(), [z, x], grad_outputs=torch.tensor(2.0), retain_graph=True),
            *torch.autograd.grad(z.sum(), [x, unused], allow_unused=True),
            x.grad,
        ]

    same(program, compiler, graphs=3)


def test_backward_for_some_inputs(compiler):
    def program(backward):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        z = x * 2
        backward((z * y).sum(), inputs=[y, z])
        return [x.grad, y.grad, z.grad]

    same(program, compiler)


def test_final_callbacks(compiler):
    def program(backward):
        x, called = torch.randn(3, requires_grad=True), []

        def hook(grad):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: called.append(x.grad.clone()))

        x.register_hook(hook)
        backward((x * x).sum())
        return [x.grad, *called]

    same(program, compiler)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x).relu()).tanh()


def test_compiled_parts_become_one_graph(compiler):
    torch.manual_seed(0)
    first, second = Net(), Net()

    def program(backward, parts=(first, second)):
        for net in (first, second):
            net.zero_grad()
        h = parts[0](torch.randn(3, 8))
        backward(parts[1](h.sin() * 1.5).pow(2).sum())
        return gradients(first) + gradients(second)

    compiled = kiln.compile(first), kiln.compile(second)
    torch.manual_seed(1)
    want = [program(torch.autograd.backward) for _ in range(3)]
    torch.manual_seed(1)
    with compiled_autograd.enable(compiler):
        got = [program(torch.autograd.backward, compiled) for _ in range(3)]
    for a, b in zip(sum(want, []), sum(got, []), strict=True):
        torch.testing.assert_close(b, a)
    assert len(compiler.graphs) == 1
    assert compiler.targets().count("aten.mm.default") >= 7  # of both parts


def test_results_of_a_compiled_part_one_after_another(compiler):
    @kiln.compile
    def two(x, y):
        return (x * 2).sin(), (y * 3).cos()

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with compiled_autograd.enable(compiler):
        a, b = two(x, y)
        a.sum().backward()
        assert y.grad is None
        b.sum().backward()
        torch.testing.assert_close(x.grad, 2 * (2 * x).cos().detach())
        torch.testing.assert_close(y.grad, -3 * (3 * y).sin().detach())
        with pytest.raises(RuntimeError, match="second time"):
            a.sum().backward()


def test_a_second_backward_is_refused_as_in_eager(compiler):
    for f in (lambda x: (x * x).sum(), kiln.compile(lambda x: (x * x).sum())):
        x = torch.randn(3, requires_grad=True)
        with compiled_autograd.enable(compiler):
            y = f(x)
            y.backward(retain_graph=True)
            y.backward()
            torch.testing.assert_close(x.grad, 4 * x.detach())
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()


def test_a_saved_tensor_that_was_written_is_refused_as_in_eager(compiler):
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    y.detach().add_(1)
    with compiled_autograd.enable(compiler), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    assert not compiler.graphs


def test_an_error_of_a_hook_reaches_the_caller(compiler):
    def hook(grad):
        raise ValueError("no gradient, please")

    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    with compiled_autograd.enable(compiler), pytest.raises(ValueError, match="no gradient, please"):
        y.sum().backward()


def test_gradients_of_gradients_run_in_eager(compiler):
    x = torch.randn(3, requires_grad=True)
    with compiled_autograd.enable(compiler):
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        assert not compiler.graphs
        g.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_what_cannot_be_traced_runs_in_eager_and_says_so_once(compiler):
    layer = torch.nn.Linear(4, 4)

    def step():
        layer.zero_grad()
        checkpoint(layer, torch.ones(2, 4), use_reentrant=False).sum().backward()
        return gradients(layer)

    want = [g.clone() for g in step()]
    with compiled_autograd.enable(compiler):
        with pytest.warns(UserWarning, match="saved by hooks"):
            got = step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step()
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a)
    assert not compiler.graphs


def test_sparse_gradients(compiler):
    table = torch.nn.Embedding(10, 4, sparse=True)
    with compiled_autograd.enable(compiler), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[1].tolist() == [4.0] * 4


def test_anomaly_detection_finds_the_function(compiler):
    x = torch.zeros(1, requires_grad=True)
    with compiled_autograd.enable(compiler), torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="SqrtBackward0.*returned nan"):
            (x.sqrt() * 0).sum().backward()


def test_autocast(compiler):
    def program(backward):
        model = torch.nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 4)).float().pow(2).sum()
        backward(loss)
        return gradients(model)

    same(program, compiler)


def test_sizes_are_graphs_of_their_own_up_to_a_limit(compiler):
    with compiled_autograd.enable(compiler), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(1, 12):
            x = torch.ones(n, 3, requires_grad=True)
            (x.sin() * x).sum().backward()
            torch.testing.assert_close(x.grad, (x.sin() + x * x.cos()).detach())
    assert len(compiler.graphs) == kiln.config.recompile_limit
    assert sum("recompile_limit" in str(w.message) for w in seen) == 1


def test_what_was_compiled_is_kept_for_the_next_block():
    compiler = Compiler()
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        with compiled_autograd.enable(compiler):
            x.exp().sum().backward()
    assert len(compiler.graphs) == 1


def test_nested_blocks():
    outer, inner = Compiler(), Compiler()
    x = torch.ones(3, requires_grad=True)
    with compiled_autograd.enable(outer):
        with compiled_autograd.enable(inner):
            x.exp().sum().backward()
        with compiled_autograd.disable():
            x.exp().sum().backward()
        assert (len(outer.graphs), len(inner.graphs)) == (0, 1)
        x.exp().sum().backward()
    x.exp().sum().backward()
    assert (len(outer.graphs), len(inner.graphs)) == (1, 1)
    torch.testing.assert_close(x.grad, 4 * x.exp().detach())


def test_a_compiler_that_returns_nothing():
    x = torch.ones(3, requires_grad=True)
    with compiled_autograd.enable(lambda gm: None):
        for _ in range(2):
            with pytest.raises(BackendError, match="cannot be called"):
                x.exp().sum().backward()


def test_threads():
    compiler, results = Compiler(kiln.compile), {}

    def work(k):
        x = torch.full((50,), float(k), requires_grad=True)
        for _ in range(20):
            x.grad = None
            (x * x).sin().sum().backward()
        results[k] = (x.grad, (2 * x * (x * x).cos()).detach())

    with compiled_autograd.enable(compiler):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(results) == 4
    for got, want in results.values():
        torch.testing.assert_close(got, want)


def test_a_compiled_step_is_captured_as_ever(compiler):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @kiln.compile
    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with compiled_autograd.enable(compiler):
        losses = [step(torch.ones(3, 4)).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert not compiler.graphs


def test_the_graph_takes_what_the_peers_graphs_take():
    compiler = Compiler()
    x = torch.ones(3, requires_grad=True)
    with compiled_autograd.enable(compiler):
        (x.exp() * 2.0).sum().backward()
    names = [n.target for n in compiler.graphs[0].graph.nodes if n.op == "placeholder"]
    assert names == ["inputs", "sizes", "scalars", "hooks", "packed_inputs"]


def test_leaves_that_saved_tensors_are_views_of(compiler):
    flat = torch.randn(24)

    def program(backward):
        x, y = flat[:12].view(3, 4).detach(), flat[12:].view(4, 3).detach()
        w = torch.randn(6, requires_grad=True)
        x.requires_grad_(), y.requires_grad_()
        backward(
            torch.kron(x, y).sin().sum()
            + (x.t() @ y.t() * w.view(2, 3).sum()).sum()
            + (x[1:] * y.view(3, 4)[:2]).sum()
            + w.view(3, 2).sin().sum()
        )
        return [x.grad, y.grad, w.grad]

    same(program, compiler)


def test_a_weight_that_a_hook_writes_while_views_of_it_are_saved(compiler):
    def program(backward):
        torch.manual_seed(2)
        w = torch.randn(4, 4, requires_grad=True)

        def update(p):
            with torch.no_grad():
                p.sub_(p.grad)

        w.register_post_accumulate_grad_hook(update)
        backward((torch.ones(2, 4) @ w.t() @ w).pow(2).mean())
        return [w.detach(), w.grad]

    same(program, compiler)


def test_parts_of_a_tensor_that_a_compiled_block_saved(capfd):
    weight, edges = torch.randn(4, 2, requires_grad=True), torch.tensor([[0, 1, 2], [1, 2, 3]])

    @kiln.compile
    def layer(edges):
        source, target = edges
        h = weight[source] * weight[target]
        kiln.graph_break()
        return torch.zeros(4, 2).index_add_(0, target, h * weight[source])

    def gradient():
        weight.grad = None
        layer(edges).sin().sum().backward()
        return weight.grad

    expected = gradient()
    kiln.set_logs("graph_breaks")
    with kiln.compiled_autograd.enable(kiln.compile):
        for _ in range(2):
            torch.testing.assert_close(gradient(), expected)
    kiln.set_logs("")
    assert "as_strided" not in capfd.readouterr().err
