"""Arrays of NumPy's in captured code: what it is run with, and how what it made is made anew.

NumPy is there where any of this is called; kiln does not need it.
"""

from __future__ import annotations

import sys


def call_of_numpy(function, *args, **kwargs):
    """Calls a function of NumPy's. What it would warn of raises a FloatingPointError."""
    numpy = sys.modules["numpy"]
    with numpy.errstate(**{kind: "ignore" if how == "ignore" else "raise" for kind, how in numpy.geterr().items()}):
        return function(*args, **kwargs)


def copied_array(array, writeable):
    """A copy of ``array`` that has its layout."""
    copy = array.copy("K")
    copy.flags.writeable = writeable
    return copy


def offset_in_array(view, owner):
    """How many bytes behind the first of ``owner``, an array, the first element of ``view`` lies."""
    return view.__array_interface__["data"][0] - owner.__array_interface__["data"][0]


def view_of_array(owner, shape, dtype, strides, offset, writeable):
    """An array of the memory of ``owner``, which is dense in some order of its dims."""
    memory = owner.transpose(sorted(range(owner.ndim), key=lambda dim: -owner.strides[dim]))
    view = sys.modules["numpy"].ndarray(shape, dtype, memory, offset, strides)
    view.flags.writeable = writeable
    return view
