"""item() of tensors: a number that the graph computes with, until its value is needed."""

import math
import re
import sys
import warnings

import pytest
import torch
from torch import nn

import kiln
from helpers import breaks

X = torch.arange(1.0, 7.0).reshape(2, 3)


def same(expected, found):
    """Equal bit by bit, classes included."""
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype
        torch.testing.assert_close(found, expected, equal_nan=True)
    elif isinstance(expected, (tuple, list)):
        assert len(expected) == len(found)
        for a, b in zip(expected, found):
            same(a, b)
    elif isinstance(expected, dict):
        assert list(expected) == list(found)
        for k in expected:
            same(expected[k], found[k])
    elif isinstance(expected, float):
        assert expected.hex() == found.hex()
    else:
        assert expected == found


def check(f, *inputs, graphs=1):
    """Calls of `f` in eager and compiled agree, with `graphs` graphs in a call."""
    compiled = kiln.compile(f)
    for args in inputs:
        same(f(*args), compiled(*args))
    assert breaks(f, *inputs[0]) == graphs - 1


SCALARS = [torch.tensor(v) for v in (0.1, 2.5, -3.0, 7.0, 1e-3)]


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.item(),
        lambda t: float(t),
        lambda t: t.tolist(),
        lambda t: (t * 2).item() + 1,
        lambda t: {"loss": t.item(), "twice": [2 * t.item(), t]},
        lambda t: 1 - t.item() * 0.1 + 3 * t.item() - t.item() / 7,
        lambda t: -t.item() + abs(t.item()) + (+t.item()),
        lambda t: t * t.item() + X * t.item(),
        lambda t: 0.9 ** t.item(),
        lambda t: abs(t.item()) ** 0.5 + t.item() ** 2 + t.item() ** -1 + abs(t.item()) ** t.item(),
        lambda t: 3 / t.item() + t.item() / (1 + abs(t.item())),
        lambda t: math.sqrt(abs(t.item())),
        lambda t: max(t.item(), 0.5) + min(1.0, t.item()) - max(t.item(), t.item() * 2),
        lambda t: 1 / max(0.5, (X * t).norm().item()),
        lambda t: torch.tensor(t.item() * 3),
        lambda t: torch.as_tensor(t.item(), dtype=torch.float64),
        lambda t: isinstance(t.item(), float) and type(t.item()) is float,
        lambda t: [v.item() for v in (t, t * 2, t * 3)],
        lambda t: (lambda: t.item() * 2)(),
        lambda t: X / t.item() + t.item() / X - t.item(),
        lambda t: torch.addcdiv(X, X, X + 1, value=t),
        lambda t: (t * 2).int().item() + X,
        lambda t: torch.add(X, X, alpha=t * 2),
        lambda t: (t > 0).item(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stays_in_the_graph(use, dtype):
    check(use, *[(t.to(dtype),) for t in SCALARS])


@pytest.mark.parametrize(
    "use, graphs",
    [
        (lambda t: X * 2 if (X * t).sum().item() > 1 else X, 2),
        (lambda t: len(f"{(t * 2).item():.2f}"), 2),
        (lambda t: X * round((t * 2).item(), 1), 2),
        (lambda t: X * int((t * 2).item()), 1),
        (lambda t: {(t + 1).item(): X * 2}, 2),
        (lambda t: (X * t.item() // 1, (t + 1).item() % 0.7), 1),
        (lambda t: math.floor((t * 1.5).item()) + X, 1),
        (lambda t: math.exp((X.mean() * t).item()) * X, 1),
        (lambda t: math.atan((t + 1).item()) * X, 2),
        (lambda t: (X * t > 0).all().item(), 2),
    ],
)
def test_what_needs_the_value_breaks_there(use, graphs):
    check(use, *[(t,) for t in SCALARS], graphs=graphs)


def test_only_the_call_that_needs_it_breaks():
    def value(t):
        return t.item()

    def f(t):
        a = value(t * 2)
        b = value(t * 3)
        y = X * round(b, 1) + a
        return y, a, b, value(y[0, 0])

    check(f, *[(t,) for t in SCALARS], graphs=2)


def test_many_calls_that_need_the_value():
    def f(t):
        total = 0
        for i in range(12):
            total += int((t * i).item()) + len(str((t + i).item()))
        return total + X

    compiled = kiln.compile(f)
    for t in SCALARS:
        same(f(t), compiled(t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_value_is_that_of_the_moment(dtype):
    def f(t):
        before = t.item()
        t.add_(1)
        between = t.item()
        t.mul_(2)
        return before, between, t.item()

    compiled = kiln.compile(f)
    for v in (0.5, 1.25, 100.0):
        a, b = torch.tensor(v, dtype=dtype), torch.tensor([[v]], dtype=dtype)
        same(f(a.clone()), compiled(a))
        same(f(b.clone()), compiled(b))


def test_gradients_stop_there():
    def f(x):
        loss = x.square().sum()
        return loss * loss.item(), (x * loss.item()).sum()

    for i in range(2):
        a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
        f(a)[i].backward()
        kiln.compile(f)(b)[i].backward()
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "use, error",
    [
        (lambda t: X * (1 / t.item()), ZeroDivisionError),
        (lambda t: t.item() ** -2, ZeroDivisionError),
        (lambda t: (2 - t.item()) ** 1050, OverflowError),
        (lambda t: 1e200 ** (2 - t.item()), OverflowError),
        (lambda t: math.sqrt(t.item() - 1e-9), ValueError),
    ],
)
def test_exceptions_are_those_of_python(use, error):
    compiled = kiln.compile(use)
    for v in (1.0, 1.25):
        same(use(torch.tensor(v)), compiled(torch.tensor(v)))
    for run in (use, compiled):
        with pytest.raises(error) as caught:
            run(torch.tensor(0.0))
        assert caught.traceback[-1].path.name == "test_item_numbers.py"
    same(use(torch.tensor(1.5)), compiled(torch.tensor(1.5)))


def test_nothing_has_happened_before_an_exception():
    def step(t, weights, log):
        for i, w in enumerate(weights):
            w.add_(1)
            t[i].sub_(1)
            log.append(i)
            w.mul_(1 / t[i].item())
        return t.sum()

    def state():
        return torch.tensor([3.0, 1.0, 5.0]), [X.clone() for _ in range(3)], []

    eager, compiled = state(), state()
    run = kiln.compile(step)
    good = state()
    good[0][1] = 4
    run(*good)
    for f, s in ((step, eager), (run, compiled)):
        with pytest.raises(ZeroDivisionError):
            f(*s)
    same(list(eager), list(compiled))
    assert eager[2] == [0, 1]


def test_a_root_of_a_negative_number_is_complex():
    def f(t):
        return (t * 2).item(), t.item() ** 0.5

    compiled = kiln.compile(f)
    for v in (4.0, 2.0, -1.0, 9.0):
        same(f(torch.tensor(v)), compiled(torch.tensor(v)))


def test_division_by_what_is_dear_to_compute():
    def f(x):
        return x * (1 / x.sum().item())

    check(f, (X,), (X + 1,))
    compiled = kiln.compile(f)
    for _ in range(2):
        same(f(X), compiled(X))
        with pytest.raises(ZeroDivisionError):
            compiled(X * 0)


def test_perplexity_of_a_training_step():
    """An exception that hangs on what the graph computes, in a graph that writes to its inputs."""
    torch.manual_seed(0)
    model, twin = [nn.Linear(3, 2) for _ in range(2)]
    twin.load_state_dict(model.state_dict())

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return math.exp(loss.item())

        return step

    eager, compiled = make(twin), kiln.compile(make(model))
    for _ in range(4):
        torch.testing.assert_close(compiled(X), eager(X), rtol=1e-4, atol=0)
    for run in (eager, compiled):
        with pytest.raises(OverflowError, match="math range error"):
            run(X * 1e3)
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0)
    assert breaks(make(nn.Linear(3, 2)), X) == 0


def test_powers_are_those_of_python():
    torch.manual_seed(0)
    bases = torch.cat([torch.rand(300, dtype=torch.float64) * 10, torch.rand(50, dtype=torch.float64) * 1e-3])
    steps = torch.arange(1.0, 351.0, dtype=torch.float64)

    def f(a, b):
        x, y = a.item(), b.item()
        return x**2, x**0.5, x**3, x**-0.8, 0.999**y, 0.9**y, x ** (y * 0.01), 1 - 0.96 ** (y * 0.004), x**1

    compiled = kiln.compile(f)
    for a, b in zip(bases, steps):
        assert compiled(a, b) == f(a, b)
    assert breaks(f, bases[0], steps[0]) == 0


class Meter:
    def __init__(self):
        self.total, self.last = 0.0, None

    def update(self, loss):
        self.last = loss.item()
        self.total += self.last


def test_accumulators():
    def step(x, meter, stats):
        loss = (x * 2).sum()
        meter.update(loss)
        stats["loss"] = loss.item()
        stats["all"] += loss.item()
        return loss

    eager, compiled = [(Meter(), {"loss": None, "all": 0.0}) for _ in range(2)]
    run = kiln.compile(step)
    for i in range(6):
        same(step(X * i, *eager), run(X * i, *compiled))
        same(eager[1], compiled[1])
        same(vars(eager[0]), vars(compiled[0]))
    assert len(run._entries) <= 3


@pytest.mark.parametrize(
    "add",
    [
        lambda h, v, i: h["list"].append(v),
        lambda h, v, i: h["dict"].__setitem__(i, v),
        lambda h, v, i: h.update({i: v}),
    ],
)
def test_histories_are_left_to_the_code_behind_a_break(add):
    def step(x, history, i):
        loss = (x * 2).sum()
        add(history, loss.item(), i)
        return loss

    eager, compiled = [{"list": [], "dict": {}} for _ in range(2)]
    run = kiln.compile(step)
    for i in range(6):
        same(step(X * i, eager, i), run(X * i, compiled, i))
        same(eager, compiled)


def test_a_growing_list_does_not_spoil_the_graph():
    history = []

    def step(x):
        loss = (x * 2).sum()
        value = loss.item()
        history.append(value)
        return loss

    run = kiln.compile(step)
    for i in range(20):
        run(X * i)
    assert len(run._entries) == 1
    assert len(history) == 20


def test_branches_on_counters_are_guards():
    def f(x, step):
        step.add_(1)
        k = step.item()
        if k < 4:
            x = x * k
        elif k % 1 == 0 and k == 6:
            x = x - k
        return x + max(1, k - 3)

    def g(x, step):
        step.add_(1)
        k = step.item()
        return x * k if k < 4 else x - max(1, k - 6), k

    for use, variants in ((f, None), (g, 3)):
        eager, counter = torch.tensor(0.0), torch.tensor(0.0)
        compiled = kiln.compile(use)
        for _ in range(10):
            same(use(X, eager), compiled(X, counter))
        if variants:
            assert len(compiled._entries) == variants
            assert breaks(use, X, counter) == 0


def test_after_a_graph_break():
    def f(x):
        a = x.sum().item()
        b = [a, a * 2]
        kiln.graph_break()
        return x * a + b[1], a, b

    check(f, (X,), (X * 2,), (X - 1,), graphs=2)


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 1),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), 1),
    "adam, tensor lr": (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False), 1),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.01), 1),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.01), 1),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True), 1),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.05), 1),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.3), 1),
    "adadelta": (lambda p: torch.optim.Adadelta(p), 1),
    "rprop": (lambda p: torch.optim.Rprop(p), 1),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.01), 1),
    "asgd": (lambda p: torch.optim.ASGD(p, lr=0.05, t0=3), 1),
}
SCHEDULERS = {
    "none": None,
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
}


def train(make_optimizer, make_scheduler, wrap, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    stats = {"total": 0.0}

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        stats["total"] += loss.item()
        return loss.item()

    run = wrap(step)
    found = []
    for _ in range(steps):
        found.append(run(torch.randn(4, 6, dtype=torch.float64)))
        if scheduler:
            scheduler.step()
    return [found, stats, list(model.parameters()), optimizer.state_dict()["state"]], step


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_train_as_in_eager(optimizer, scheduler):
    make, graphs = OPTIMIZERS[optimizer]
    expected, _ = train(make, SCHEDULERS[scheduler], lambda f: f)
    found, step = train(make, SCHEDULERS[scheduler], kiln.compile)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert breaks(step, torch.randn(4, 6, dtype=torch.float64)) == graphs - 1


def test_custom_backends_break():
    def backend(gm, inputs):
        return gm.forward

    def f(x):
        return (x * 2).sum().item() + 1

    compiled = kiln.compile(f, backend=backend)
    assert compiled(X) == f(X)
    with pytest.raises(Exception, match="graph break"):
        kiln.compile(f, backend=backend, fullgraph=True)(X)


def test_switched_off():
    def f(x):
        return (x * 2).sum().item() + 1

    with kiln.config.patch(disable_passes="capture.item_numbers"):
        assert breaks(f, X) == 1
    kiln.reset()
    assert breaks(f, X) == 0


def test_ints_out_of_tensors():
    class Metric:
        def __init__(self):
            self.correct, self.seen, self.ratio = 0, 0, 0.0

        def update(self, scores, labels):
            self.correct += (scores.argmax(1) == labels).sum().item()
            self.seen += int(labels.numel())
            self.ratio = self.correct / self.seen
            return int(labels.max()), labels.min().item()

    eager, metric = Metric(), Metric()
    compiled = kiln.compile(lambda m, x, y: m.update(x, y))
    for _ in range(8):
        x, y = torch.randn(5, 3), torch.randint(0, 3, (5,))
        same(eager.update(x, y), compiled(metric, x, y))
        same(vars(eager), vars(metric))
    assert len(compiled._entries) <= 3
    assert breaks(lambda m, x, y: m.update(x, y), metric, x, y) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_extreme_ints_out_of_tensors(dtype):
    def f(t):
        n = t.item()
        return n, -n, abs(n), n + n, n * 3 - 1, n % 7, n // 3, n / 3, n > 5, max(n, 4), t.tolist(), X + n

    info = torch.iinfo(dtype)
    compiled = kiln.compile(f)
    for v in (info.max, info.min, 1, 0, 5):
        same(f(torch.tensor(v, dtype=dtype)), compiled(torch.tensor(v, dtype=dtype)))


def test_a_count_that_is_written_in_place():
    def f(x):
        n = (x > 2).sum()
        n.mul_(2**40)
        return x + n.item() * 2**20

    same(f(X), kiln.compile(f)(X))


def test_foreach_optimizers_stay_in_one_graph():
    for make in (torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam, torch.optim.Adagrad):
        results = []
        for wrap in (lambda f: f, kiln.compile):
            torch.manual_seed(0)
            model = nn.Linear(4, 4).double()
            optimizer = make(model.parameters(), foreach=True)

            def step(x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

            run = wrap(step)
            for i in range(4):
                run(torch.full((2, 4), float(i), dtype=torch.float64))
            results.append([p.detach() for p in model.parameters()])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)
        assert breaks(step, torch.ones(2, 4, dtype=torch.float64)) == 0


def test_booleans_of_masks_and_lengths_are_branches():
    def f(x, mask):
        if (mask == 0).any().item():
            x = x * mask
        padded = bool(mask.min().item() == 0) if (mask.sum() > 3).item() else None
        return x + 1, padded

    full, holes, few = (
        torch.ones(2, 3, dtype=torch.int64),
        torch.tensor([[1, 1, 0], [1, 1, 1]]),
        torch.zeros(2, 3).long(),
    )
    check(f, (X, full), (X, holes), (X, few), (X, full), (X, holes))


def test_a_bool_of_a_tensor():
    def f(x, n):
        return x + 1 if bool(n.sum() > 3) and not bool(torch.tensor(0)) else x * 2

    check(f, (X, torch.tensor([1, 2])), (X, torch.tensor([3, 2])), graphs=1)


LIMITS = (torch.tensor(2), torch.tensor(5)), (torch.tensor(5), torch.tensor(2)), (torch.tensor(3), torch.tensor(3))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, a, b: x * max(a, b),
        lambda x, a, b: x * min([a + 1, b]),
        lambda x, a, b: max(a, 3) + x,
        lambda x, a, b: x + sorted([b, a], reverse=True)[0],
        lambda x, a, b: x * any([a > b, b == 3]),
        lambda x, a, b: x + sum(filter(None, [a - 3, b])),
        lambda x, a, b: x * ([1, 3].index(b) if b == 3 else 7),
        lambda x, a, b: nn.functional.pad(x, (a, max(a, b) - b)),
    ],
)
def test_truths_that_c_code_asks_for(f):
    check(f, *((X, *limits) for limits in LIMITS), graphs=1)


def test_a_boolean_of_a_large_tensor_breaks():
    check(lambda x: x + 1 if (x > 0).all().item() else x - 1, (X,), (-X,), graphs=2)


def test_data_that_decide_otherwise_at_each_call():
    """A guard for each outcome would end at the recompile limit, and all in eager."""

    def f(x, lengths):
        y = x * 2
        for i in range(4):
            if lengths[i].item() + lengths.sum().item() > 4:
                y = y + i
        return y

    compiled = kiln.compile(f)
    for number in range(16):
        lengths = torch.tensor([number >> i & 1 for i in range(4)]) * 4
        same(f(X, lengths), compiled(X, lengths))
    kiln.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = kiln.compile(f)
        for number in range(16):
            compiled(X, torch.tensor([number >> i & 1 for i in range(4)]) * 4)


def test_tolist_of_one_element_keeps_its_dims():
    def program(x, i):
        return x.tolist(), x.view(1, 1).tolist(), x.sum().tolist(), i.view(1, 1, 1).tolist(), (i * 2).tolist()

    want = ([2.5], [[2.5]], 2.5, [[[3]]], [6])
    assert kiln.compile(program)(torch.tensor([2.5]), torch.tensor([3])) == want


def stop(value):
    if not math.isfinite(value):
        print("the loss is", value)
        sys.exit(1)


def want_a_number(value):
    if math.isnan(value):
        raise AssertionError("not a number")


def refuse(value):
    if math.isinf(value) or math.isnan(value):
        raise ValueError(f"{value}")


@pytest.mark.parametrize("guard", [stop, want_a_number, refuse])
def test_a_loss_that_is_no_number(guard):
    """What ends the program, or the step, does not break the graph; where it happens, nothing was written before."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x):
            loss = model(x).square().mean()
            guard(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step, model

    (eager, twin), (step, model) = make(), make()
    compiled = kiln.compile(step)
    for x in (X, X + 1, X * math.nan, X, X * 1e30, X):
        outcomes = []
        for run in (eager, compiled):
            try:
                outcomes.append(run(x))
            except (SystemExit, AssertionError, ValueError) as error:
                outcomes.append((type(error), str(error)))
        same(*[o if isinstance(o, tuple) else torch.tensor(o) for o in outcomes])
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    assert breaks(make()[0], X) == 0


def test_powers_of_a_number_are_taken_once(capfd):
    """Adam's bias corrections belong before the loop over a parameter, not into it."""
    p = torch.nn.Parameter(torch.randn(64, 100))
    optimizer = torch.optim.Adam([p], lr=1e-3)

    def step():
        optimizer.step()

    compiled = kiln.compile(step)
    kiln.set_logs("llvm_ir")
    for _ in range(3):
        p.grad = torch.randn_like(p)
        compiled()
    kiln.set_logs("")
    blocks = re.split(r"\n(?=[\w.]+:)", capfd.readouterr().err)
    powers = [b for b in blocks if "@kiln_libm_pow" in b and "declare" not in b]
    assert powers
    assert not [b for b in powers if re.search(r"store <\d+ x float>", b)]


@pytest.mark.parametrize(
    "use",
    [
        lambda t: int(t) + 1,
        lambda t: float(t) * 2,
        lambda t: str(t.item()),
        lambda t: f"{float(t):.2f}",
        lambda t: [0] * t.item(),
        lambda t: list(range(t)),
        lambda t: [1, 2, 3, 4, 5, 6][t],
        lambda t: list(range(9))[t:],
        lambda t: max(int(t), 2),
        lambda t: {t.item(): 1},
        lambda t: t.tolist(),
        lambda t: torch.ones(2, 3).size(t.item() % 2),
    ],
)
def test_numbers_of_ints_without_a_graph(use):
    """What an input's data decide is asked again, though nothing is computed of it."""
    compiled = kiln.compile(use)
    for _ in range(2):
        for n in (1, 4, 3, 2):
            same(use(torch.tensor(n)), compiled(torch.tensor(n)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_lists_of_data_without_a_graph(dtype):
    def f(t):
        return t.tolist(), "".join("abcd"[int(i)] for i in t.tolist()), sum(t.tolist())

    def g(t):
        doubled = t + t
        kiln.graph_break()
        return doubled.tolist(), t.tolist()

    for program in (f, g):
        compiled = kiln.compile(program)
        for values in ([1, 3], [2, 0], [1, 1], [2, 0]):
            t = torch.tensor(values).to(dtype)
            same(program(t), compiled(t))


class Slots:
    """Its special methods give numbers and texts that are read from a tensor."""

    def __init__(self, t):
        self.t = t

    def whole(self):
        return int(self.t.sum().item())

    def __eq__(self, other):
        return isinstance(other, Slots)

    def real(self):
        return self.t.sum().item()

    def text(self, *_):
        return str(self.t.sum().item())

    __hash__ = __index__ = __int__ = whole
    __float__ = real
    __format__ = __str__ = __repr__ = text

    def __complex__(self):
        return complex(self.t.sum().item())


SLOT_PROGRAMS = {
    "hash": lambda x: x + hash(Slots(x)),
    "key": lambda x: {Slots(x): x + 1}[Slots(x)],
    "index": lambda x: x + list(range(40))[Slots(x)],
    "range": lambda x: x + len(range(Slots(x))),
    "repeat": lambda x: x + len([0] * Slots(x)),
    "slice": lambda x: torch.cat([x, x, x])[: Slots(x)],
    "int": lambda x: x + int(Slots(x)),
    "float": lambda x: x + float(Slots(x)),
    "complex": lambda x: x * complex(Slots(x)),
    "sqrt": lambda x: x + math.sqrt(Slots(x)),
    "format": lambda x: (x, f"{Slots(x)}"),
    "str": lambda x: (x, str(Slots(x)), repr(Slots(x))),
    "percent": lambda x: (x, "%s" % Slots(x), "%d" % Slots(x)),
    "join": lambda x: (x, ",".join(map(str, [Slots(x)]))),
    "size": lambda x: x.new_zeros(Slots(x)),
    "substitute": lambda x: (x, re.sub("a", lambda m: str(x.sum().item()), "bab")),
    "bin": lambda x: (x, bin(Slots(x))),
}


@pytest.mark.parametrize("program", SLOT_PROGRAMS.values(), ids=SLOT_PROGRAMS.keys())
def test_numbers_that_special_methods_give_to_c_code(program):
    # C code refuses a stand-in with a TypeError, which was the program's to catch.
    def f(x):
        try:
            return program(x)
        except TypeError as e:
            return str(e)

    same(f(X), kiln.compile(f)(X))


EQUALITY = {
    "branch": lambda x, y: x + 1 if torch.equal(x, y) else x - 1,
    "method": lambda x, y: x + 1 if x.equal(other=y) else x - 1,
    "result": lambda x, y: (torch.equal(x, y), x + 1),
    "not": lambda x, y: not torch.equal(x, y),
    "and": lambda x, y: x * (torch.equal(x, x) and not torch.equal(x, y + 1)),
}


@pytest.mark.parametrize("program", EQUALITY.values(), ids=EQUALITY.keys())
def test_equal_is_asked_in_the_graph(program):
    compiled = kiln.compile(program, fullgraph=True)
    nan = torch.tensor([1.0, math.nan])
    for x, y in [(X, X.clone()), (X, X + 1), (X, X[:1]), (X, X.T), (nan, nan), (torch.empty(0), torch.empty(0))]:
        if program is not EQUALITY["and"] or x.shape == y.shape:
            same(program(x, y), compiled(x, y))


def test_equal_of_two_dtypes():
    def f(x, y):
        return torch.equal(x, y), x + 1

    for y in (X.long(), X.double() + 1e-12, X.half()):
        same(f(X, y), kiln.compile(f)(X, y))
