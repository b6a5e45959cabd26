"""Bad input: eager's behaviour or a clear error, and the process goes on."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.dlpack import to_dlpack

import kiln
from helpers import check
from kiln.testing import assert_same

X = torch.linspace(-2, 2.6, 12).reshape(3, 4)


def f(x):
    return (x * 2).relu() + 1


def works_afterwards():
    assert_same(kiln.compile(f)(X), f(X))


def test_backend_that_raises():
    def broken(gm, example_inputs):
        raise KeyError("no kernel")

    with pytest.raises(kiln.exc.BackendError, match=r"broken.*raised KeyError.*no kernel") as caught:
        kiln.compile(f, backend=broken)(X)
    assert isinstance(caught.value.__cause__, KeyError)
    works_afterwards()


@pytest.mark.parametrize("thing", [None, 3, "text", (1, 2)])
def test_backend_that_returns_no_callable(thing):
    with pytest.raises(kiln.exc.BackendError, match="returns a callable"):
        kiln.compile(f, backend=lambda gm, example_inputs: thing)(X)
    works_afterwards()


def test_backend_whose_callable_raises():
    def backend(gm, example_inputs):
        def run(*args):
            raise OSError("lost")

        return run

    with pytest.raises(OSError, match="lost"):
        kiln.compile(f, backend=backend)(X)
    works_afterwards()


@pytest.mark.parametrize("result", [None, 3, [], [1, 2, 3, 4]])
def test_backend_whose_callable_returns_nonsense(result):
    with pytest.raises((kiln.exc.KilnError, TypeError, ValueError)):
        kiln.compile(f, backend=lambda gm, example_inputs: lambda *args: result)(X)
    works_afterwards()


def test_backend_that_changes_the_graph():
    """A backend may: what it returns is what runs."""

    def negate(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.op == "output":
                (value,) = node.args[0]
                with gm.graph.inserting_before(node):
                    new = gm.graph.call_function(torch.neg, (value,))
                node.args = ((new,),)
        gm.recompile()
        return gm.forward

    assert_same(kiln.compile(f, backend=negate)(X), -f(X))
    works_afterwards()


def test_backend_that_changes_example_inputs():
    def scribble(gm, example_inputs):
        example_inputs.clear()
        return gm.forward

    assert_same(kiln.compile(f, backend=scribble)(X), f(X))


def test_backend_that_compiles_itself():
    def nested(gm, example_inputs):
        return kiln.compile(gm.forward, backend="eager")

    assert_same(kiln.compile(f, backend=nested)(X), f(X))


def test_functions_that_are_not_python():
    for function, args in [
        (torch.relu, (X,)),
        (len, ([1, 2],)),
        (max, (1, 2)),
        (torch.nn.functional.relu, (X,)),
        (int, None),
    ]:
        if args is None:
            with pytest.raises(kiln.exc.UserError, match="not a class"):
                kiln.compile(function)
        else:
            assert kiln.testing.same(kiln.compile(function)(*args), function(*args))


def test_scripted_and_traced_functions():
    traced = torch.jit.trace(f, (X,))
    assert_same(kiln.compile(lambda x: traced(x) * 2)(X), f(X) * 2)


def test_data_dependent_shape():
    class Select(torch.nn.Module):
        def forward(self, x):
            kept = x[x > 0]
            return kept * 2, kept.shape[0], torch.nonzero(x).sum(), torch.unique(x.round())

    m = Select()
    compiled = kiln.compile(m)
    for x in (X, -X + 1, X * 0):
        assert_same(compiled(x), m(x))


def test_meta_tensors():
    def g(x):
        return (x * 2).sum(1), x.t()

    x = torch.empty(3, 4, device="meta")
    expected, actual = g(x), kiln.compile(g)(x)
    for e, a in zip(expected, actual):
        assert a.device.type == "meta" and a.shape == e.shape and a.stride() == e.stride()
    assert_same(kiln.compile(g)(X), g(X))


def test_recursion_without_end():
    def endless(x):
        return endless(x + 1)

    compiled = kiln.compile(endless)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        with pytest.raises(RecursionError):
            compiled(X)
    finally:
        sys.setrecursionlimit(limit)
    works_afterwards()


def test_deep_but_finite_recursion():
    def deep(x, n):
        return x if n == 0 else deep(x + 1, n - 1)

    check(lambda x: deep(x, 150), X, calls=1)


def test_exception_half_way():
    log = []

    def g(x, table):
        table["before"] = x + 1
        x.add_(1)
        log.append("one")
        y = x * 2
        table["value"] = y
        table["missing key"]["deeper"] = 1
        log.append("two")
        return y

    def run(function):
        log.clear()
        x, table = X.clone(), {}
        with pytest.raises(KeyError) as caught:
            function(x, table)
        return x, table, list(log), str(caught.value)

    compiled = kiln.compile(g)
    assert_same(run(g), run(compiled))
    assert_same(run(g), run(compiled))


def test_shape_error_of_the_user_reads_as_in_eager():
    def g(x):
        return x @ x

    with pytest.raises(RuntimeError) as expected:
        g(X)
    with pytest.raises(RuntimeError) as actual:
        kiln.compile(g)(X)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity(value):
    check(lambda x: (x / x.sum()).softmax(1) + x.max(), X * value)


def test_arguments_of_every_kind():
    def g(*args, **kwargs):
        return args[0] * 2, args[1:], kwargs

    module = torch.nn.Linear(2, 2)
    things = [None, 1, 2.5, "s", b"b", 1j, True, [1], (1,), {1: 2}, {3}, frozenset({4}), range(3), slice(1, 2), len, int, module, torch.float32,
              torch.device("cpu"), torch.Size([1, 2]), object(), Ellipsis, NotImplemented, iter([1])]  # fmt: skip
    compiled = kiln.compile(g)
    for thing in things:
        a, b, c = compiled(X, thing, k=thing)
        assert_same(a, X * 2)
        assert b == (thing,) and b[0] is thing and c["k"] is thing


def test_tensor_subclass_with_torch_function():
    class Logged(torch.Tensor):
        calls = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = X.clone().as_subclass(Logged)
    expected = f(x)
    names = list(Logged.calls)
    Logged.calls.clear()
    actual = kiln.compile(f)(x)
    assert type(actual) is type(expected)
    assert_same(actual.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    assert [n for n in Logged.calls if n in names][: len(names)] == names


def test_keyboard_interrupt_in_the_program():
    def g(x):
        y = x + 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kiln.compile(g)(X)
    works_afterwards()


def test_system_exit_and_generator_exit():
    def g(x, kind):
        y = x * 2
        raise kind("bye")

    for kind in (SystemExit, GeneratorExit):
        with pytest.raises(kind):
            kiln.compile(g)(X, kind)


def test_ctrl_c_during_a_compile():
    """A signal in the middle of a long compile: KeyboardInterrupt or a finished call, and kiln works afterwards."""

    def long(x):
        for i in range(3000):
            x = torch.sin(x) * 1.01 + i
        return x

    small = X * 0.1
    for delay in (0.05, 0.3):
        kiln.reset()
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        start = time.time()
        try:
            timer.start()
            with kiln.config.patch(codegen=False):
                kiln.compile(long)(small)
            while time.time() - start < delay + 0.05:  # the signal may come after the call
                time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        timer.join()
    works_afterwards()


def test_what_a_signal_handler_raises_comes_out_of_the_call():
    def endless(x):
        while True:
            try:
                x = x + 1
            except Exception:
                pass

    def handler(number, frame):
        raise TimeoutError("alarm")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="alarm"):
            kiln.compile(endless)(X)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    works_afterwards()


def test_a_capture_without_an_end_is_given_up():
    def count(x, n):
        for _ in range(n):
            x = x + 1
        return x

    with kiln.config.patch(graph_size_limit=200), pytest.warns(UserWarning, match="200 tensor operations"):
        assert_same(kiln.compile(count)(X, 1000), X + 1000)
    kiln.reset()

    def python_only(x, n):
        k = 0
        while k < n:
            k += 1
        return x + k

    with kiln.config.patch(capture_limit=2000), pytest.warns(UserWarning, match="2000 instructions"):
        assert_same(kiln.compile(python_only)(X, 10000), X + 10000)


def test_error_while_the_backend_runs_leaves_no_state():
    state = {"fail": True}

    def backend(gm, example_inputs):
        if state["fail"]:
            raise RuntimeError("first time")
        return gm.forward

    compiled = kiln.compile(f, backend=backend)
    with pytest.raises(kiln.exc.BackendError):
        compiled(X)
    state["fail"] = False
    assert_same(compiled(X), f(X))


def test_changing_a_container_while_iterating():
    def g(x, table):
        for key in table:
            table[key + "x"] = x
        return x

    check(g, X, {"a": 1})


def test_module_without_forward():
    with pytest.raises(NotImplementedError):
        kiln.compile(torch.nn.Module())(X)


def test_internal_failure_falls_back_with_one_warning(tmp_path):
    """Without KILN_STRICT a failure inside kiln gives eager's result and one warning; with it, the error."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import warnings
            import torch, kiln

            def f(x):
                return x.sin() + 1

            def g(x):
                return f(x) * 2

            x = torch.ones(3)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    assert torch.equal(kiln.compile(g)(x), g(x))
                    assert torch.equal(kiln.compile(f)(x), f(x))
            print("warnings:", sum("kiln" in str(w.message) for w in caught))
            """
        )
    )
    package = Path(__file__).resolve().parent.parent.parent / "python"
    for strict in ("0", "1"):
        env = {**os.environ, "KILN_STRICT": strict, "KILN_INJECT_FAILURE": "decompose", "PYTHONPATH": str(package)}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=120)
        if strict == "0":
            assert done.returncode == 0, done.stderr[-2000:]
            assert done.stdout.strip() == "warnings: 1"
        else:
            assert done.returncode != 0 and "InternalError" in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*jit")
def test_jit_trace_sees_the_operators():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    compiled = kiln.compile(net)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    with torch.no_grad():
        compiled(x)
    traced = torch.jit.trace(compiled, x)
    torch.testing.assert_close(traced(y), net(y))

    @kiln.compile
    def traces(x):
        return torch.jit.trace(lambda t: (t.nonzero(), t * 2), x)(x + 1)

    assert torch.equal(traces(x)[1], (x + 1) * 2)


def test_a_capsule_is_used_up_once():
    def program(x):
        y = x * 2
        return torch.asarray(to_dlpack(y)) + 1, torch.from_dlpack(y)

    x = torch.arange(6.0).view(2, 3)
    assert_same(program(x), kiln.compile(program)(x))


@pytest.mark.parametrize("logs", ["", "step_times"])
@pytest.mark.parametrize(
    "use", [lambda x, i: x.gather(0, i), lambda x, i: x[i], lambda x, i: F.embedding(i, x[:, None])]
)
def test_an_error_of_data_leaves_what_came_before_it(use, logs, request):
    """Nothing that was there has been written when the kernel raises: the call runs in eager, which raises then."""
    kiln.set_logs(logs)
    request.addfinalizer(lambda: kiln.set_logs(""))

    def step(x, i, seen, parameter):
        seen["log"].append("begins")
        seen["count"].add_(1)
        x = F.dropout(x, 0.5)
        (parameter * 2).sum().backward()
        try:
            return use(x, i) + 1
        finally:
            seen["log"].append("ends")

    def run(function):
        torch.manual_seed(0)
        seen, parameter = {"log": [], "count": torch.zeros(1)}, torch.ones(2, requires_grad=True)
        results = []
        for i in ([0, 1], [5, 0], [0, 0], [1, 9]):
            try:
                results.append(function(torch.arange(4.0), torch.tensor(i), seen, parameter))
            except (IndexError, RuntimeError) as e:
                results.append((type(e), str(e)))
        return results, seen, parameter.grad, torch.rand(2)

    assert_same(run(kiln.compile(step)), run(step))


def bad_labels(i):
    return torch.tensor([0, 7, 2] if i % 3 == 0 else [0, 1, 2])


def normalized_loss(state, x, y):
    state.count.add_(1)
    return F.cross_entropy(state.net(x), y)


def normalized_step(state, x, y):
    state.count.add_(1)
    loss = F.cross_entropy(state.net(x), y)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def data_written(state, x, y):
    state.bias.data.add_(0.1)
    return F.cross_entropy(F.linear(x, state.net[0].weight, state.bias)[:, :3], y)


def read_and_written(state, x, y):
    state.count.add_(0.1)
    state.rows[1:].mul_(2)
    return F.nll_loss(x * state.count + state.rows[1, 1], y)


@pytest.mark.parametrize(
    "program, frozen",
    [
        (normalized_step, False),  # it trains
        *[
            (program, frozen)
            for program in (normalized_loss, data_written, read_and_written)
            for frozen in (False, True)
        ],
    ],
)
def test_an_error_behind_small_writes_undoes_them(program, frozen):
    """The call runs in eager then, which writes them, once, and raises its own error."""

    def run(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).requires_grad_(not frozen)
        state = SimpleNamespace(net=net, count=torch.zeros(1), rows=torch.ones(3, 3))
        state.bias = torch.zeros(6, requires_grad=True)
        state.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) if not frozen else None
        function, results = wrap(program), []
        for i in range(6):
            try:
                results.append(function(state, torch.randn(3, 4), bad_labels(i)))
            except (IndexError, RuntimeError) as e:
                results.append((type(e), str(e)))
        tensors = [state.count, state.rows, state.bias]
        return results, net.state_dict(), tensors, [t._version for t in tensors]

    assert_same(run(kiln.compile), run(lambda f: f))


def test_one_call_that_raises_does_not_keep_the_function_in_eager():
    def step(x, kind):
        try:
            if kind == 0:
                raise KeyError("bad")
            return torch.sin(x) * 2
        except KeyError as e:
            raise RuntimeError("wrapped") from e

    compiled = kiln.compile(step)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="wrapped") as raised:
            compiled(torch.ones(2), 0)
        assert repr(raised.value.__cause__) == "KeyError('bad')"
        assert_same(compiled(torch.ones(2), 1), step(torch.ones(2), 1))
    hits = compiled._entries[0]["hits"]
    compiled(torch.ones(2), 1)
    assert compiled._entries[0]["hits"] == hits + 1


def test_zero_tensors_without_memory():
    zero = torch._efficientzerotensor(4)
    assert_same(kiln.compile(f)(zero), torch.ones(4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_after_dense_ones(layout):
    layer = nn.Linear(4, 4)
    compiled = kiln.compile(layer)
    with torch.no_grad():
        for x in (torch.rand(2, 3, 4), torch.rand(2, 5, 4)):
            assert_same(compiled(x), layer(x), rtol=1e-5)
        parts = [torch.rand(3, 4), torch.rand(2, 4)]
        nested = torch.nested.nested_tensor(parts, layout=layout)
        for part, expected in zip(compiled(nested).unbind(), layer(nested).unbind(), strict=True):
            assert_same(part, expected, rtol=1e-5)
