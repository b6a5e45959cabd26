"""The package around the core: versions, options, backends' table, comparison helper."""

import contextlib
import dataclasses
import re
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import torch

import kiln
from kiln import _check, testing
from kiln.explanation import Entry, Explanation


def test_versions_that_fit():
    assert _check.mismatch("3.11", "2.13.0", "3.11", "2.13.1+cpu") is None


@pytest.mark.parametrize(
    "python, torch_version, says",
    [
        ("3.12", "2.13.0", "python3.11"),
        ("3.11", "2.14.0", "pip install 'torch==2.13.*'"),
        ("3.11", "2.1.3", "pip install 'torch==2.13.*'"),
        ("3.11", None, "pip install 'torch==2.13.*'"),
    ],
)
def test_versions_that_do_not_fit(python, torch_version, says):
    assert says in _check.mismatch("3.11", "2.13.0", python, torch_version)


def test_import_under_another_torch_is_an_import_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(ImportError, match=r"pip install 'torch==2\.13\.\*'"):
        _check.check_versions()


def test_the_wheel_keeps_the_libraries():
    # A pattern that keeps a checkout's own libraries out keeps out those that were built for the wheel, too.
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["scikit-build"]["wheel"]["exclude"]
    for name in ("kiln/_C.so", "kiln/libkiln.so"):
        assert not [p for p in patterns if PurePosixPath(name).match(p)]


def test_config_reads_writes_and_patches():
    before = kiln.config.recompile_limit
    with kiln.config.patch(recompile_limit=3):
        assert kiln.config.recompile_limit == 3
        with kiln.config.patch("recompile_limit", 4):
            assert kiln.config.recompile_limit == 4
        assert kiln.config.recompile_limit == 3
    assert kiln.config.recompile_limit == before

    @kiln.config.patch({"fusion": False})
    def inside():
        return kiln.config.fusion

    assert inside() is False
    assert kiln.config.fusion is True


def test_config_is_set_back_after_an_exception():
    with pytest.raises(ZeroDivisionError), kiln.config.patch(fusion=False):
        1 / 0
    assert kiln.config.fusion is True


def test_config_rejects_unknown_names_and_types():
    with pytest.raises(AttributeError, match="no option 'nothing'"):
        kiln.config.nothing
    with pytest.raises(AttributeError, match="no option 'nothing'"):
        kiln.config.nothing = 1
    with pytest.raises(kiln.exc.UserError, match="of type int"):
        kiln.config.recompile_limit = "8"
    with pytest.raises(kiln.exc.UserError), kiln.config.patch(nothing=1):
        pass
    with pytest.raises(kiln.exc.UserError), kiln.config.patch(fusion=False, recompile_limit="x"):
        pass
    assert kiln.config.fusion is True


def test_config_lists_every_option():
    names = [row[0] for row in kiln._C.option_table()]
    assert set(names) <= set(dir(kiln.config))
    assert "strict = " in repr(kiln.config)


def test_unknown_log_topic():
    with pytest.raises(kiln.exc.UserError, match="nothing"):
        kiln.set_logs("graph,nothing")


def logged_topics():
    page = Path(__file__).parents[2] / "docs" / "logs.md"
    return re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("topic", logged_topics())
def test_every_log_topic_prints(topic, capfd):
    def f(x, w):
        y = torch.linalg.det(x @ w)
        if y > 0:
            y = y * 2
        return y.cos()

    kiln.reset()  # what its branch did for other topics
    compiled = kiln.compile(f, dynamic=False)
    backwards = kiln.compiled_autograd.enable if topic == "compiled_autograd" else contextlib.nullcontext
    kiln.set_logs(topic)
    try:
        for size in (2, 3):
            w = torch.eye(size, requires_grad=True)
            for _ in range(12):
                with backwards():
                    compiled(torch.eye(size), w).backward()
    finally:
        kiln.set_logs("")
    text = capfd.readouterr().err
    assert topic in text
    if topic == "timing":
        assert re.search(r"\d ms  capture", text) and re.search(r"\d ms  codegen", text)


def test_backends_table():
    assert "kiln" in kiln.list_backends()
    assert {"eager", "aot_eager", "print"} <= set(kiln.list_backends(exclude_tags=()))
    assert "eager" not in kiln.list_backends()
    eager = kiln.lookup_backend("eager")
    assert kiln.lookup_backend(eager) is eager
    with pytest.raises(kiln.exc.UserError, match="unknown backend 'nothing'.*eager"):
        kiln.lookup_backend("nothing")


def test_register_backend():
    from kiln.backends import registry

    @kiln.register_backend(name="mine")
    def mine(gm, example_inputs):
        return gm.forward

    try:
        assert kiln.lookup_backend("mine") is mine
        with pytest.raises(kiln.exc.UserError, match="already"):
            kiln.register_backend(mine, name="mine")
        with pytest.raises(kiln.exc.UserError, match="callable"):
            kiln.register_backend(3, name="three")
    finally:
        del registry._backends["mine"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"backend": "nothing"}, "unknown backend"),
        ({"backend": 3}, "name or a callable"),
        ({"mode": "fast"}, "unknown mode"),
        ({"mode": "default", "options": {}}, "not both"),
        ({"options": {"nothing": 1}}, "no option 'nothing'"),
        ({"options": {"fusion": 1}}, "of type bool"),
    ],
)
def test_compile_checks_its_arguments_at_once(arguments, says):
    with pytest.raises(kiln.exc.UserError, match=says):
        kiln.compile(lambda x: x, **arguments)
    with pytest.raises(kiln.exc.UserError, match=says):
        kiln.compile(**arguments)


def test_a_backend_gets_the_options_that_are_not_kilns():
    seen = []

    def backend(gm, example_inputs, **given):
        seen.append(given)
        return gm.forward

    x = torch.ones(2)
    for options in ({"level": 2, "what": "all"}, {"level": 2, "fusion": False}, {"fusion": False}, None):
        f = kiln.compile(lambda x: x + 1, backend=backend, options=options)
        assert torch.equal(f(x), x + 1)
    assert seen == [{"options": {"level": 2, "what": "all"}}, {"options": {"level": 2}}, {}, {}]


@pytest.mark.parametrize("thing", [3, None.__class__, torch.nn.Linear, "text", torch.ones(2)])
def test_compile_of_what_cannot_be_compiled(thing):
    with pytest.raises(kiln.exc.UserError, match="kiln.compile takes"):
        kiln.compile(thing)


def test_disable_true_returns_the_function_itself():
    def f(x):
        return x

    assert kiln.compile(f, disable=True) is f
    assert kiln.compile(disable=True)(f) is f


def test_generator_function_runs_in_eager():
    def numbers():
        yield 1

    with pytest.warns(UserWarning, match="generator"):
        assert kiln.compile(numbers) is numbers


def test_marks():
    x = torch.ones(2, 3)
    kiln.mark_dynamic(x, -1)
    assert x._kiln_dynamic_dims == {1}
    kiln.mark_static(x)
    assert x._kiln_dynamic_dims == set() and x._kiln_static_dims == {0, 1}
    with pytest.raises(kiln.exc.UserError, match="out of range"):
        kiln.mark_dynamic(x, 2)


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: float


@pytest.mark.parametrize(
    "a, b",
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2, 2), torch.ones(2, 2).t()[:, :1].expand(2, 2)),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2), torch.tensor([1.0, 1.1])),
        (torch.ones(2), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Pair(torch.ones(1), 1.0), Pair(torch.zeros(1), 1.0)),
        (1.0, 2.0),
        (1, True),
        (torch.ones(1), torch.nn.Parameter(torch.ones(1), requires_grad=False)),
    ],
)
def test_same_sees_the_difference(a, b):
    assert not testing.same(a, b)
    with pytest.raises(AssertionError):
        testing.assert_same(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
        lambda: [torch.ones(2), {"x": (1, "a", None)}],
        lambda: Pair(torch.ones(1), float("nan")),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.ones(0, 3),
    ],
)
def test_same_accepts_equal_values(make):
    assert testing.same(make(), make())


def test_explanation_text():
    record = {
        "function": "f",
        "file": "f.py",
        "line": 3,
        "graph": "graph f:\n  %x = input",
        "ops": ["torch.cos", "torch.cos", "torch.add"],
        "guards": ["L['x'] is a float32 tensor"],
        "break": {
            "id": "data-dependent-branch",
            "cause": "a branch",
            "hint": "use where",
            "stack": "",
            "file": "f.py",
            "line": 4,
        },
        "stages": [("capture", 0.001), ("codegen", 0.002)],
    }
    told = Explanation(
        [Entry.from_record(record), Entry.from_record({"function": "g", "stages": [("capture", 0.001)]})]
    )
    assert (told.graph_count, told.graph_break_count, told.op_count) == (1, 1, 3)
    assert told.stage_times == {"capture": 0.002, "codegen": 0.002}
    text = str(told)
    for part in (
        "1 graph, 1 break, 3 ops, 1 guard",
        "torch.cos x2",
        "data-dependent-branch",
        "f.py:4",
        "use where",
        "codegen",
    ):
        assert part in text


def test_every_callable_of_the_table_exists():
    """A path of callables.def that names nothing would silently lose its policy."""
    of_other_builds = {"torch._C._cuda_getDeviceCount"}
    assert set(kiln._C._unresolved_callables()) <= of_other_builds
