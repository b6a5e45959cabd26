"""Random programs that run in eager and compiled: each kind has a grammar of its own, a program is made of a seed.

test_random_programs.py runs a fixed choice of seeds. To look for others, in tests/python:

    python -m random_programs memory 0 5000      # kind, first seed, last seed

prints each program whose compiled run differs, and how.
"""

from . import arithmetic, dtypes, gradients, layers, memory, modules, objects, parts, sizes, training

KINDS = {
    "arithmetic": arithmetic,
    "dtypes": dtypes,
    "gradients": gradients,
    "layers": layers,
    "memory": memory,
    "modules": modules,
    "objects": objects,
    "parts": parts,
    "sizes": sizes,
    "training": training,
}
