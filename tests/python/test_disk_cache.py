"""Kernels that one process compiles and the next finds on disk."""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent.parent / "python"

# Prints whether LLVM ran; fails on a wrong number.
PROGRAM = """
import torch, kiln
from kiln.testing import assert_same

def f(x):
    return torch.lgamma(torch.tanh(x).softmax(-1) + x.sin()), x.sum(0)

x = torch.linspace(0.1, 9, 4000).reshape(40, 100)
compiled = kiln.compile(f)
assert_same(compiled(x), f(x), rtol=1e-5, atol=1e-5)
stages = dict(kiln._C.stage_times())
print("compiled" if "codegen.llvm" in stages else "found")
"""


def start(folder, program=PROGRAM, **env):
    env = {**os.environ, "KILN_DISK_CACHE": "1", "KILN_CACHE_DIR": str(folder), "PYTHONPATH": str(PACKAGE), **env}
    command = [sys.executable, *program] if isinstance(program, list) else [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(*args, **env):
    process = start(*args, **env)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return (out + err).strip() if env else out.strip()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder that a process has written to."""
    folder = tmp_path_factory.mktemp("cache") / "kiln"
    assert run(folder) == "compiled"
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy of it."""
    shutil.copytree(written, tmp_path / "kiln")
    os.chmod(tmp_path / "kiln", 0o700)
    return tmp_path / "kiln"


def change(folder, *sql):
    with sqlite3.connect(folder / "kernels.sqlite") as db:
        for statement in sql:
            db.execute(statement)
        assert db.total_changes > 0
    db.close()


def test_the_next_process_finds_them(folder):
    assert run(folder) == "found"
    assert (folder.stat().st_mode & 0o777) == 0o700
    cli = run(folder, ["-m", "kiln", "cache"], COLUMNS="200")
    assert "kernels.sqlite: " in cli and ": 0 kernels" not in cli
    assert ": 0 kernels" in run(folder, ["-m", "kiln", "cache", "--clear"], COLUMNS="200")
    assert run(folder) == "compiled"
    assert run(folder) == "found"


def test_off(folder):
    assert run(folder, PROGRAM, KILN_DISK_CACHE="0") == "compiled"
    assert "disk_cache is off" in run(folder, ["-m", "kiln", "cache"], COLUMNS="200", KILN_DISK_CACHE="0")
    assert run(folder, PROGRAM, KILN_DISABLE_PASSES="codegen.reuse") == "compiled"


def test_damaged_code_is_not_run(folder):
    change(folder, "UPDATE kernels SET code = CAST(code || x'00' AS BLOB)")
    assert run(folder) == "compiled"
    assert run(folder) == "found"  # replaced


def test_functions_that_are_not_there(folder):
    change(folder, "UPDATE kernels SET externals = CAST('kiln_no_such_function' || x'0a' AS BLOB)")
    assert run(folder) == "compiled"


def test_another_build(folder):
    """The key ends with the code generator's build: another one's kernels are not for this one."""
    change(folder, "UPDATE kernels SET key = CAST(substr(key, 1, length(key) - 4) || x'30303030' AS BLOB)")
    assert run(folder) == "compiled"


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_no_database(folder, size):
    for file in folder.iterdir():
        file.unlink()
    (folder / "kernels.sqlite").write_bytes(b"\x01" * size)
    assert run(folder) == "compiled"
    assert run(folder) == "found"


def test_a_database_of_another_format(folder):
    change(folder, "DELETE FROM kernels", "PRAGMA user_version = 77")
    assert run(folder) == "compiled"
    assert run(folder) == "found"


def test_a_folder_that_others_may_write_to(folder):
    os.chmod(folder, 0o777)
    out = run(folder, PROGRAM, KILN_LOGS="fallback")
    assert "compiled" in out and "its user alone" in out


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "kiln") == "compiled"


def test_the_usual_places(tmp_path):
    home = {"HOME": str(tmp_path / "home"), "KILN_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    assert run("", PROGRAM, **home) == "compiled"
    assert (tmp_path / "home/.cache/kiln/kernels.sqlite").exists()
    home["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert run("", PROGRAM, **home) == "compiled"
    assert (tmp_path / "xdg/kiln/kernels.sqlite").exists()


def test_room_is_made(folder):
    with sqlite3.connect(folder / "kernels.sqlite") as db:
        db.execute("INSERT INTO kernels VALUES ('large and old', zeroblob(3000000), '', 0, 0)")
    db.close()
    program = PROGRAM.replace("x.sum(0)", "x.sum(0) + 1")
    assert run(folder, program, KILN_DISK_CACHE_MB="1") == "compiled"
    with sqlite3.connect(folder / "kernels.sqlite") as db:
        sizes = [size for (size,) in db.execute("SELECT length(code) FROM kernels")]
    db.close()
    assert sizes and max(sizes) < 1000000


def test_processes_at_once(tmp_path):
    processes = [start(tmp_path / "kiln") for _ in range(3)]
    for p in processes:
        out, err = p.communicate(timeout=120)
        assert p.returncode == 0, err
    assert run(tmp_path / "kiln") == "found"


def test_a_forked_process(tmp_path):
    program = (
        PROGRAM
        + """
import os
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    g = kiln.compile(lambda x: f(x)[0] * 3)
    assert_same(g(x), f(x)[0] * 3, rtol=1e-5, atol=1e-5)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
    run(tmp_path / "kiln", program)
    assert (
        run(tmp_path / "kiln", PROGRAM.replace("return torch", "return 3 * torch").replace(", x.sum(0)", "")) == "found"
    )
