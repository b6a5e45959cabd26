"""`kiln.config`: the options of the C++ table as attributes, and `patch` to change them for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from kiln import _C, exc


class _Patch(contextlib.ContextDecorator):
    """Sets options on entering, and sets them back on leaving. Usable as a context manager and as a decorator, again and
    again, nested too."""

    def __init__(self, changes: dict[str, Any]) -> None:
        for name in changes:
            _C.get_option(name)  # an unknown name fails here, not on entering
        self._changes = changes
        self._saved: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        saved: dict[str, Any] = {}
        self._saved.append(saved)
        try:
            for name, value in self._changes.items():
                before = _C.get_option(name)
                _C.set_option(name, value)
                saved[name] = before
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for name, value in self._saved.pop().items():
            _C.set_option(name, value)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return patched


class Config:
    """Every option is an attribute; `docs/options.md` lists them. An unknown one is an AttributeError, a value of another
    type a kiln.exc.UserError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return _C.get_option(name)
        except exc.UserError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattr__(name)
        _C.set_option(name, value)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *(row[0] for row in _C.option_table())]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((row[0], _C.get_option(row[0])) for row in _C.option_table())

    def patch(self, name: str | dict[str, Any] | None = None, value: Any = None, **changes: Any) -> _Patch:
        """Changes options for a `with` block or a decorated function: patch(fusion=False), patch("fusion", False) or
        patch({"fusion": False})."""
        if isinstance(name, dict):
            changes = {**name, **changes}
        elif name is not None:
            changes[name] = value
        return _Patch(changes)

    def __repr__(self) -> str:
        return "\n".join(f"{name} = {value!r}" for name, value in self)


config = Config()
