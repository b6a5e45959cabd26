"""Checks that the packages pinned in requirement files are installed in exactly those versions.

Usage: check_env.py FILE... [--verbose]. Exits with 1 if one is missing or differs (and says which, with --verbose).
A local part of an installed version ("2.13.0+cpu") is not compared.
"""

import sys
from importlib import metadata
from pathlib import Path


def differences(path: Path) -> list[str]:
    found = []
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        name, _, wanted = line.partition("==")
        try:
            version = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            found.append(f"{name} {wanted} is not installed")
            continue
        if version != wanted:
            found.append(f"{name} is {version}, wanted {wanted}")
    return found


def main() -> int:
    verbose = "--verbose" in sys.argv
    problems = [p for name in sys.argv[1:] if name != "--verbose" for p in differences(Path(name))]
    if verbose:
        for problem in problems:
            print(f"setup: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
