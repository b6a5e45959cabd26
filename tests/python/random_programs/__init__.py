"""Random programs that run in eager and compiled: each kind has a grammar of its own, a program is made of a seed.

test_random_programs.py runs a fixed choice of seeds. To look for others, in tests/python:

    python -m random_programs memory 0 5000      # kind, first seed, last seed

prints each program whose compiled run differs, and how.
"""

from . import (
    arithmetic,
    containers,
    control,
    dtypes,
    gradients,
    layers,
    library,
    memory,
    modules,
    numbers,
    objects,
    parts,
    selections,
    sizes,
    training,
)

KINDS = {
    "arithmetic": arithmetic,
    "containers": containers,
    "control": control,
    "dtypes": dtypes,
    "gradients": gradients,
    "layers": layers,
    "library": library,
    "memory": memory,
    "modules": modules,
    "numbers": numbers,
    "objects": objects,
    "parts": parts,
    "selections": selections,
    "sizes": sizes,
    "training": training,
}
