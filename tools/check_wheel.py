"""Unpacks the wheel in dist/, checks its size, and compiles a function with it where no compiler can be found.

Usage: check_wheel.py WHEEL [--limit-mb 100]. Exits with 1 and a message if something is wrong.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROGRAM = """
import torch, kiln
from pathlib import Path
assert Path(kiln.__file__).is_relative_to({folder!r}), kiln.__file__
def f(x): return torch.softmax(torch.sin(x) @ x.t(), -1).amax()
x = torch.randn(8, 8, requires_grad=True)
out = kiln.compile(f, fullgraph=True)(x)
out.backward()
torch.testing.assert_close(out, f(x))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--limit-mb", type=float, default=100.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.wheel) as wheel:
        missing = {"kiln/_C.so", "kiln/libkiln.so"} - set(wheel.namelist())
        if missing:
            sys.exit(f"check_wheel: {args.wheel} lacks {', '.join(sorted(missing))}")
        size = sum(entry.file_size for entry in wheel.infolist()) / 2**20
        if size > args.limit_mb:
            sys.exit(f"check_wheel: {args.wheel} takes {size:.0f} MB installed, more than {args.limit_mb:.0f}")
        wheel.extractall(folder)
        # torch comes from this interpreter; everything else from the wheel, and no tool from anywhere.
        environment = {"PATH": "/nonexistent", "HOME": folder, "PYTHONPATH": folder, "KILN_STRICT": "1"}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(folder=folder)], env=environment, cwd=folder)
        if done.returncode != 0:
            sys.exit(f"check_wheel: a program does not run with {args.wheel}")
    print(f"{args.wheel}: {size:.0f} MB installed; compiles and runs without compiler and LLVM")


if __name__ == "__main__":
    main()
