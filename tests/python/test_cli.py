"""The command line: doctor, explain, bisect, autotune, as a user runs them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import kiln
from kiln.cli import bisect

PACKAGE = Path(__file__).resolve().parent.parent.parent / "python"


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "kiln", *map(str, args)],
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "200", **env},
    )  # fmt: skip


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "case.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch

            def f(x):
                return torch.softmax(x * 2 + 1, -1)

            def case():
                return f, (torch.linspace(-1, 1, 12).reshape(3, 4),)

            def main():
                print(f(torch.ones(2, 2)).sum())
            """
        )
    )
    return path


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    for command in ("doctor", "bench", "explain", "bisect", "autotune", "cache"):
        assert command in done.stdout


def test_doctor():
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kiln works here" in done.stdout and "pytorch" in done.stdout


def test_explain_a_function(case, tmp_path):
    done = run("explain", f"{case}:main", "--svg", tmp_path / "svg")
    assert done.returncode == 0, done.stderr
    assert "1 graph" in done.stdout and "softmax" in done.stdout
    assert list((tmp_path / "svg").glob("*.svg"))


def test_explain_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, kiln, sys\nprint(kiln.compile(lambda x: x.cos() + 1)(torch.ones(2)), sys.argv[1])\n"
    )
    done = run("explain", script, "argument")
    assert done.returncode == 0, done.stderr
    assert "argument" in done.stdout and "cos" in done.stdout


def test_autotune(case):
    done = run("autotune", f"{case}:case", "--backends", "eager,kiln", "--calls", "3")
    assert done.returncode == 0, done.stderr
    assert "fastest:" in done.stdout


def test_bad_targets(case):
    for args in (
        ("autotune", "nothing.py:f"),
        ("autotune", f"{case}:nothing"),
        ("bisect", f"{case}:case", "--by", "line"),
    ):
        done = run(*args)
        assert done.returncode == 2 and "Error" in done.stderr


def test_bisect_says_when_all_is_well(case):
    done = run("bisect", f"{case}:case")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to find" in done.stdout


def test_bisect_finds_the_graph(tmp_path):
    """The third of five functions is 'wrong': the command fails once it is compiled."""
    script = tmp_path / "wrong.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch, kiln

            names = []
            def make(k):
                def f(x):
                    return x * k + 1
                f.__code__ = f.__code__.replace(co_name=f"f{k}", co_qualname=f"f{k}")
                return f

            def backend(gm, example_inputs):
                names.append(1)
                return gm.forward

            for k in range(5):
                before = len(names)
                kiln.compile(make(k), backend=backend)(torch.ones(2))
                if k == 2 and len(names) > before:
                    sys.exit(1)
            """
        )
    )
    done = run("bisect", "--by", "function", "--", sys.executable, script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "function 3 of" in done.stdout and "f2" in done.stdout


def test_passes_to_bisect(capfd):
    """Also choices that are made within a stage are reported, so that they are tried."""
    kiln.set_logs("bisect")
    try:
        kiln.compile(torch.nn.Conv2d(32, 32, 3, padding=1))(torch.ones(4, 32, 8, 8))
    finally:
        kiln.set_logs("")
    found = bisect.passes(capfd.readouterr().err)
    assert {"capture.changing_ints", "joint.channels_last", "schedule.in_place", "plan.winograd"} <= set(found)


@pytest.mark.parametrize("count, bad", [(1, 1), (7, 1), (7, 7), (7, 4), (100, 63)])
def test_binary_search(count, bad):
    tried = []
    assert bisect.first_bad(count, lambda n: tried.append(n) or n < bad) == bad
    assert len(tried) <= 7


def test_reading_the_log():
    text = "bisect\nfunction 1: f (a.py:3)\n  graph 2: g (refused)\nkernel x: no\nother"
    assert bisect.counted(text, "function") == {1: "f (a.py:3)"}
    assert bisect.counted(text, "graph") == {2: "g"}
    assert bisect.counted(text, "kernel") == {}
