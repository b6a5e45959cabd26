"""kiln: a compiler for unmodified PyTorch programs.

    import kiln

    @kiln.compile
    def step(x, y): ...

    model = kiln.compile(model)

`kiln.explain(f)(*args)` shows what was captured, `python -m kiln doctor` whether this installation works.
"""

from kiln import _check

_check.check_versions()

import torch  # noqa: E402  (kiln._C links against it, so it is loaded first)

from kiln import _optimizers, aot, compiled_autograd, exc, testing  # noqa: E402
from kiln._build_info import VERSION as __version__  # noqa: E402
from kiln.api import (  # noqa: E402
    allow_in_graph,
    assume_constant_result,
    compile,
    compile_in_place,
    disable,
    disallow_in_graph,
    graph_break,
    is_compiling,
    mark_dynamic,
    mark_static,
    reset,
    run,
    set_logs,
)
from kiln.backends import list_backends, lookup_backend, register_backend  # noqa: E402
from kiln.configuration import config  # noqa: E402
from kiln.explanation import explain  # noqa: E402
from kiln.module import OptimizedModule  # noqa: E402

__all__ = [
    "OptimizedModule",
    "__version__",
    "allow_in_graph",
    "aot",
    "assume_constant_result",
    "compile",
    "compile_in_place",
    "compiled_autograd",
    "config",
    "disable",
    "disallow_in_graph",
    "exc",
    "explain",
    "graph_break",
    "is_compiling",
    "list_backends",
    "lookup_backend",
    "mark_dynamic",
    "mark_static",
    "register_backend",
    "reset",
    "run",
    "set_logs",
    "testing",
]
_optimizers.call_directly()
del torch
