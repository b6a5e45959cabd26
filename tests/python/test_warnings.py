"""warnings.warn in compiled code stays in the graph, and says what, and where, eager says it."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import breaks, check
from kiln.testing import assert_same

X = torch.randn(3)


def warn_caller(x):
    warnings.warn("here", FutureWarning, stacklevel=2)
    return x + 1


def plain(x):
    warnings.warn("plain")
    return x * 2


def of_caller(x):
    return warn_caller(x) * 2


def by_keywords(x):
    warnings.warn(message="keywords", category=DeprecationWarning, stacklevel=1, source=None)
    return x * 2


def with_numbers(x):
    warnings.warn(f"{len(x)} elements")
    return x * 2


def of_pytorch(x):
    return F.interpolate(F.upsample(x[None, None], scale_factor=2), scale_factor=2)


def ignored(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = warn_caller(x)
    warnings.warn("after")
    return y


def ignored_by_message(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="he")
        return warn_caller(x) * 2


@contextlib.contextmanager
def log_of_warnings(action):
    for module in list(sys.modules.values()):
        if isinstance(vars(module).get("__warningregistry__"), dict):
            module.__warningregistry__.clear()
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter(action)
        yield log


def told(f, action, calls=3):
    with log_of_warnings(action) as log:
        results = [f(X) for _ in range(calls)]
    return [(str(w.message), w.category, w.filename, w.lineno) for w in log], results[-1]


STAY = [plain, of_caller, by_keywords, with_numbers, of_pytorch, ignored, ignored_by_message]


@pytest.mark.parametrize("action", ["default", "always", "ignore", "once"])
@pytest.mark.parametrize("f", STAY)
def test_warnings_are_told_as_in_eager(f, action):
    expected, result = told(f, action)
    got, compiled = told(kiln.compile(f), action)
    assert got == expected
    assert torch.equal(result, compiled)


@pytest.mark.parametrize("f", STAY)
def test_they_stay_in_the_graph(f):
    with log_of_warnings("default"):
        assert breaks(f, X) == 0


def collected(x):
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        y = warn_caller(x)
    return y, len(log)


def raised(x):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return warn_caller(x)
    except FutureWarning as error:
        return x - 1, str(error)


def of_whoever_calls(x):
    warnings.warn("outside", stacklevel=2)
    return x * 2


def no_warning(x):
    warnings.warn("no category", int)
    return x


@pytest.mark.parametrize("f", [collected, raised, of_whoever_calls])
def test_what_runs_in_eager(f):
    expected, result = told(f, "default")
    got, compiled = told(kiln.compile(f), "default")
    assert got == expected
    assert_same(result, compiled)


def test_errors():
    with pytest.raises(TypeError, match="category must be a Warning subclass"):
        kiln.compile(no_warning)(X)


def test_a_filter_that_raises_comes_later():
    """The program stops at the warning, before what it writes behind it."""
    seen = torch.zeros(3)

    def f(x):
        y = warn_caller(x)
        seen.add_(1)
        return y

    compiled = kiln.compile(f)
    with log_of_warnings("default"):
        compiled(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="here"):
            compiled(X)
    assert seen.tolist() == [1, 1, 1]


def test_a_registry_that_is_replaced():
    compiled = kiln.compile(of_caller)
    with log_of_warnings("default") as log:
        compiled(X)
        globals()["__warningregistry__"] = {}
        compiled(X)
    assert len(log) == 2


WARNS_AND_BREAKS = """
import torch
import kiln

@kiln.compile
def f(x):
    at = (x * 0).sum(0).long() + 1
    return x[[at[0], at[1] + 1]]

print(f(torch.arange(16.0).reshape(4, 4)).item())
"""


def test_a_warning_beside_a_graph_break_is_shown(tmp_path):
    # PyTorch shows it while the break is on its way out of the operator. In a file, whose line is shown too.
    path = tmp_path / "warns_and_breaks.py"
    path.write_text(WARNS_AND_BREAKS)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6.0"
    assert "non-tuple sequence" in done.stderr
    assert "GraphBreak" not in done.stderr


def takes_a_list_of_indices(x):
    return x[[torch.tensor([1]), torch.tensor([2])]] + 1


def ignores_it(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return takes_a_list_of_indices(x)


@pytest.mark.parametrize("action", ["default", "always", "once", "module", "error"])
@pytest.mark.parametrize("f", [takes_a_list_of_indices, ignores_it])
def test_warnings_of_c_code(f, action):
    x = torch.arange(16.0).reshape(4, 4)

    def logged(f):
        globals().pop("__warningregistry__", None)
        with log_of_warnings(action) as log:
            results = []
            for _ in range(3):
                try:
                    results.append(f(x))
                except UserWarning as warning:
                    results.append(str(warning))
        return results, [(str(w.message), w.filename, w.lineno) for w in log]

    assert_same(logged(f), logged(kiln.compile(f)))
    if action != "error":
        assert kiln.explain(takes_a_list_of_indices)(x).graph_break_count == 0


def test_warnings_that_the_function_records():
    def two(x):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warnings.warn("first", stacklevel=1)
            warnings.warn("second", DeprecationWarning, stacklevel=1)
        return len(told), x + len(told)

    def between(x):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warnings.warn("first", stacklevel=1)
            y, n = x * 2, len(told)
            warnings.warn("second", stacklevel=1)
            m = len(told)
        return n, m, y

    def again(x):
        counts = []
        for _ in range(2):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                warnings.warn("first", stacklevel=1)
            counts.append([str(w.message) for w in told])
        return counts, x + 1

    for f in (two, between, again):
        check(f, torch.ones(2))
