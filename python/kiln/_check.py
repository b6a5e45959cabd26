"""Checks, before anything of kiln's is loaded, that this Python and this PyTorch are those kiln was built for.

The C++ core reads CPython's frames and PyTorch's dispatcher, whose layouts change from minor to minor; loaded into another
one it would crash instead of failing with a message.
"""

import sys
from importlib import metadata


def minor(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def mismatch(built_python: str, built_torch: str, python: str, torch: str | None) -> str | None:
    """What is wrong and what to install, or None. Versions are compared by their first two numbers.

    torch: the installed PyTorch's version, None if there is none.
    """
    wanted = minor(built_torch)
    if minor(python) != minor(built_python):
        return (
            f"this build of kiln is for CPython {minor(built_python)}, and this is CPython {minor(python)}. "
            f"Run it with python{minor(built_python)}, or install a build of torch-kiln for CPython {minor(python)}."
        )
    if torch is None:
        return f"kiln needs PyTorch {wanted}, and no PyTorch is installed. Run: pip install 'torch=={wanted}.*'"
    if minor(torch) != wanted:
        return (
            f"this build of kiln is for PyTorch {wanted}, and PyTorch {torch} is installed. "
            f"Run: pip install 'torch=={wanted}.*' (or install a build of torch-kiln for PyTorch {minor(torch)})."
        )
    return None


def installed_torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def check_versions() -> None:
    """Raises ImportError if kiln's C++ core is not built, or was built for another Python or PyTorch."""
    try:
        from kiln import _build_info as build
    except ImportError:
        raise ImportError(
            "kiln's C++ core is not built. In a checkout run `make build`; otherwise install the wheel: pip install torch-kiln"
        ) from None
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    loaded = sys.modules.get("torch")
    torch = getattr(loaded, "__version__", None) or installed_torch()
    if sys.implementation.name != "cpython":
        raise ImportError(f"kiln runs on CPython {build.PYTHON} only, and this is {sys.implementation.name}.")
    problem = mismatch(build.PYTHON, build.TORCH, python, None if torch is None else str(torch))
    if problem is not None:
        raise ImportError(problem)
