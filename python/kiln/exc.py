"""Exceptions that kiln raises. All derive from KilnError."""


class KilnError(RuntimeError):
    """Base of kiln's exceptions."""


class UserError(KilnError):
    """kiln was called wrongly: an unknown option, a bad backend, something that cannot be compiled."""


class Unsupported(KilnError):
    """A program that kiln does not compile, where falling back to eager was not allowed."""


class GraphBreakError(Unsupported):
    """`fullgraph=True` met a graph break. The message names the cause, the user's file and line, and a hint."""


class BackendError(KilnError):
    """A backend raised or returned something that cannot be called. The backend's exception is `__cause__`."""


class RecompileLimit(KilnError):
    """`fullgraph=True` met the recompile limit."""


class InternalError(KilnError):
    """A bug of kiln's own. Without KILN_STRICT=1 the program runs in eager instead, with one warning."""
