"""Texts that are made of numbers and sizes of the graph: a str when the captured part is left, if anything wants it."""

import pytest
import torch

import kiln
from helpers import breaks
from kiln.testing import assert_same

X = torch.arange(1.0, 7.0).reshape(2, 3)
COUNTS = [torch.tensor([True] * n + [False] * (9 - n)) for n in (1, 4, 7, 2, 9, 0)]
SCALARS = [torch.tensor(v) for v in (0.1, 2.5, -3.0, 1e-7, 1e20)]


def check(f, *inputs, graphs=1):
    compiled = kiln.compile(f)
    for args in inputs:
        expected, found = f(*args), compiled(*args)
        assert type(expected) is type(found)
        assert expected == found
    assert breaks(f, *inputs[0]) == graphs - 1


@pytest.mark.parametrize(
    "use",
    [
        lambda t: f"{t.item()}",
        lambda t: f"loss {t.item():.4f}, twice {2 * t.item():>12.3e}!",
        lambda t: f"{t}",
        lambda t: f"{(t * 2).sum():.2f}",
        lambda t: f"{t.item()!r:>20}|{t.item()!s}|{t.item()!a}",
        lambda t: f"{f'{t.item():.3f}':>15}",
        lambda t: str(t.item()) + repr(t.item()) + format(t.item(), "+.2e") + format(t.item()),
        lambda t: "a" + str(t.item()) + "b",
        lambda t: "%.3f and %s" % (t.item(), t.item()),
        lambda t: "%8.2f" % t.item(),
        lambda t: "{:.2f} {} {name}".format(t.item(), 3, name="x") if t is None else "{:.2f} {}".format(t.item(), 3),
        lambda t: ", ".join([f"{k}={v.item():.2f}" for k, v in {"a": t, "b": t + 1}.items()]),
        lambda t: ", ".join(f"{k}={v.item():.2f}" for k, v in {"a": t, "b": t + 1}.items()),
        lambda t: {"text": [f"{t.item()}", (f"{t.item():g}", 1)]},
        lambda t: isinstance(f"{t.item()}", str) and type(f"{t.item()}") is str and f"{t.item()}" is not None,
        lambda t: (lambda message=f"{t.item():.1f}": message)(),
    ],
)
def test_of_floats(use):
    check(use, *[(t,) for t in SCALARS])


@pytest.mark.parametrize(
    "use",
    [
        lambda m: f"{m.sum()}",
        lambda m: f"tokens: {m.sum().item():04d}, {m.sum().item():#x}",
        lambda m: "%d of %i" % (m.sum().item(), len(m)),
        lambda m: str(m.sum().item() * 2 + 1),
    ],
)
def test_of_counts(use):
    check(use, *[(m,) for m in COUNTS])


def test_a_text_that_nobody_wants_compiles_once():
    def f(x, mask):
        count = mask.sum()
        message = f"{count} tokens, {x.shape[0]} rows"
        if (x > 1e6).any():
            raise ValueError(message)
        return x * count

    compiled = kiln.compile(f)
    for mask in COUNTS:
        assert torch.equal(compiled(X, mask), f(X, mask))
    assert len(compiled._entries) == 1
    with pytest.raises(ValueError, match="4 tokens, 2 rows"):
        compiled(X * 1e7, COUNTS[1])


@pytest.mark.parametrize(
    "use",
    [
        lambda s: len(s),
        lambda s: s == "4",
        lambda s: {"4": 1, "7": 2}.get(s, 3),
        lambda s: s.upper() + s[0] + s * 2,
        lambda s: "4" in s,
        lambda s: [c for c in s],
        lambda s: int(s) + 1,
        lambda s: s if s else None,
        lambda s: hash(s) == hash(str(s)),
        lambda s: max(s, "5"),
        lambda s: f"{s:>{len(s) + 2}}",
        lambda s: s.encode(),
        lambda s: "x".join(s),
        lambda s: {s: 1},
        lambda s: sorted([s, "5"]),
        lambda s: s + s.strip(),
    ],
)
def test_what_needs_the_text_gets_it(use):
    def f(x, mask):
        y = x * 2
        return use(f"{mask.sum()}"), y.sum().item()

    compiled = kiln.compile(f)
    for mask in COUNTS:
        assert compiled(X, mask) == f(X, mask)


@pytest.mark.parametrize("text", ["{:zz}", "{:d}", "{:c}", "{.missing}", "%d %d", "%c"])
def test_errors_of_formats_are_eager_s(text):
    def f(t):
        return text % t.item() if "%" in text else text.format(t.item())

    compiled = kiln.compile(f)
    for t in (torch.tensor(2.5), torch.tensor(65), torch.tensor(-1)):
        try:
            expected = f(t)
        except (ValueError, TypeError, AttributeError, OverflowError) as e:
            with pytest.raises(type(e)) as raised:
                compiled(t)
            assert str(raised.value) == str(e)
        else:
            assert compiled(t) == expected


def test_printing_breaks_at_the_print_alone(capsys):
    def f(x):
        loss = (x * x).mean()
        print(f"loss {loss.item():.4f}")
        return loss * 2

    compiled = kiln.compile(f)
    for k in range(4):
        assert torch.equal(compiled(X + k), f(X + k))
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == lines[1::2] and len(set(lines)) == 4
    assert breaks(f, X) == 1


def test_a_history_of_texts():
    def run(wrap):
        log = []

        def f(x):
            log.append(f"{x.sum().item():.2f}")
            return x * 2

        f = wrap(f)
        for k in range(12):
            f(X + k)
        return log

    assert run(kiln.compile) == run(lambda f: f)


def test_sizes_stay_open():
    def f(x):
        return x * 2, f"{x.shape[0]} rows, {x.shape[0] * 2:>5} twice, {x.shape}"

    def g(x):
        return x * 2, f"{x.shape[0]} rows, {x.shape[0] * 2:>5} twice" + " of %d" % x.shape[1]

    for h, most in ((f, 9), (g, 1)):
        compiled = kiln.compile(h, dynamic=True)
        for n in (3, 5, 8, 4):
            x = torch.ones(n, 3)
            expected, found = h(x), compiled(x)
            assert torch.equal(expected[0], found[0]) and expected[1] == found[1]
        assert len(compiled._entries) <= most


def test_attributes_and_resume_functions():
    class Log:
        pass

    def f(x, log):
        log.text = f"sum {x.sum().item()}"
        y = x * 2
        kiln.graph_break()
        log.again = log.text + f" then {y.sum().item()}"
        return y

    a, b, compiled = Log(), Log(), kiln.compile(f)
    for k in range(4):
        assert torch.equal(compiled(X + k, a), f(X + k, b))
        assert vars(a) == vars(b)


def test_rounded_to_digits():
    """As metrics are logged."""

    def f(x, log):
        loss = x.square().mean().item()
        log["loss"] = round(loss, 4)
        share = round(100 * loss / 3, 1)
        return x + 1, share, f"{share}%", isinstance(share, float), round(x.sum().long().item(), -1)

    compiled = kiln.compile(f, fullgraph=True)
    for i in range(4):
        x, given, wanted = torch.tensor([0.12345 * i, 2.0]), {"loss": 0.0}, {"loss": 0.0}
        assert_same(compiled(x, given), f(x, wanted))
        assert given == wanted and type(given["loss"]) is float
    assert len(compiled._entries) == 1


def test_rounded_numbers_that_are_needed():
    def f(x):
        share = round(x.mean().item(), 2)
        return x * 2 if share > 0.5 else x, share + 1, max(share, 1.0)

    compiled = kiln.compile(f)
    for i in range(4):
        assert_same(compiled(torch.full((3,), 0.3 * i)), f(torch.full((3,), 0.3 * i)))
