"""The table of backends by name, and the checks around a backend's call."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kiln import exc

Backend = Callable[..., Any]
NATIVE = "kiln"
_backends: dict[str, tuple[Backend, tuple[str, ...]]] = {}


def register_backend(backend: Backend | None = None, name: str | None = None, tags: tuple[str, ...] = ()) -> Any:
    """Gives a backend a name that kiln.compile(backend=name) takes. A decorator when called without a backend.

    tags: "debug" keeps it out of list_backends() with its default arguments.
    """
    if backend is None:
        return functools.partial(register_backend, name=name, tags=tags)
    if isinstance(backend, str):  # @register_backend("name")
        return functools.partial(register_backend, name=backend, tags=tags)
    if not callable(backend):
        raise exc.UserError(f"a backend must be callable, not {backend!r}")
    name = name or getattr(backend, "__name__", None)
    if not name:
        raise exc.UserError("register_backend needs a name for a backend that has none")
    if name in _backends:
        raise exc.UserError(f"there is a backend {name!r} already")
    _backends[name] = (backend, tuple(tags))
    return backend


def list_backends(exclude_tags: tuple[str, ...] = ("debug",)) -> list[str]:
    """Names that kiln.compile(backend=...) takes, without those that have one of `exclude_tags`."""
    _load_builtin()
    return sorted(name for name, (_, tags) in _backends.items() if not set(tags) & set(exclude_tags or ()))


def lookup_backend(name: str | Backend) -> Backend:
    """The backend of that name; a backend itself is returned as it is. Raises kiln.exc.UserError for an unknown name."""
    if not isinstance(name, str):
        return name
    _load_builtin()
    if name not in _backends:
        raise exc.UserError(f"unknown backend {name!r}; the backends are {', '.join(list_backends(()))}")
    return _backends[name][0]


def _load_builtin() -> None:
    from kiln.backends import builtin  # noqa: F401  (registers its backends)


def check(backend: Any) -> Any:
    """Raises kiln.exc.UserError for a name that is not known and for what cannot be called."""
    if isinstance(backend, str):
        lookup_backend(backend)
    elif not callable(backend):
        raise exc.UserError(f"backend must be a name or a callable, not {backend!r}")
    return backend


def resolve(backend: Any) -> Backend | None:
    """What the C++ core takes: None for its own pipeline, or a backend whose mistakes become clear errors."""
    if backend == NATIVE:
        return None
    name = backend if isinstance(backend, str) else backend_name(backend)
    found = lookup_backend(backend)
    try:
        return _checked_once(found, name)
    except TypeError:  # a backend that cannot be hashed
        return checked(found, name)


def with_options(backend: Any, options: dict[str, Any]) -> Backend:
    """The backend, called with `options=options` besides the graph and its inputs."""
    found = lookup_backend(backend)
    given = functools.partial(found, options=options)
    given.__qualname__ = backend_name(found)  # type: ignore[attr-defined]
    return given


def backend_name(backend: Any) -> str:
    return getattr(backend, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(backend))


@functools.lru_cache(maxsize=256)
def _checked_once(backend: Backend, name: str) -> Backend:
    """One wrapper for a backend, however often it is used: compiled entries are shared by equal requests."""
    return checked(backend, name)


def checked(backend: Backend, name: str) -> Backend:
    def call(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        try:
            compiled = backend(gm, example_inputs)
        except exc.Unsupported as error:  # of kiln.aot, in the backend
            warnings.warn(f"kiln: a graph for backend {name!r} runs in eager: {error}", stacklevel=2)
            return gm.forward
        except Exception as error:
            raise exc.BackendError(f"backend {name!r} raised {type(error).__name__}: {error}") from error
        if not callable(compiled):
            raise exc.BackendError(
                f"backend {name!r} returned {type(compiled).__name__} {compiled!r}; a backend returns a callable that "
                "takes the graph's inputs, for example gm.forward"
            )
        return compiled

    call.__name__ = call.__qualname__ = name
    return call
