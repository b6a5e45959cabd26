"""Python helpers that compiled code calls when it leaves a captured region."""

from __future__ import annotations


def rebuild(function, args, state=None):
    """The object that ``__reduce__`` described as ``(function, args, state)``: an iterator at its position, a partial."""
    made = function(*args)
    if state is not None:
        made.__setstate__(state)
    return made
