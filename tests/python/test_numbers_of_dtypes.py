"""Python's numbers where a tensor's dtype cannot hold them: fractions, negative and large ones, infinities."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import kiln

DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32]
NUMBERS = ["1.5", "-0.5", "300", "-1", "2**60 + 1", "70000", "1e30", "1e39", "float('inf')", "float('nan')", "True"]
EXPRESSIONS = [
    *["F.pad(x, (1, 1), value={n})", "torch.full_like(x, {n})", "x.masked_fill(m, {n})", "x.scatter(0, j[None], {n})"],
    *[
        "x.index_fill(0, j, {n})",
        "torch.where(m, x, {n})",
        "x.clone().fill_({n})",
        "x.clamp(max={n})",
        "x + {n}",
        "x * {n}",
    ],
    *[
        "x == {n}",
        "x < {n}",
        "torch.full((2,), {n}, dtype=x.dtype)",
        "x.new_full((2,), {n})",
        "torch.add(x, x, alpha={n})",
    ],
    *[
        "torch.tensor({n}, dtype=x.dtype) + x",
        "put(x.clone(), m, {n})",
        "put(x.clone(), 0, {n})",
        "put(x.clone(), j, {n})",
    ],
]


def put(x, index, value):
    x[index] = value
    return x


def result(function, x):
    try:
        return function(x)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_is_as_eager(dtype):
    x = torch.arange(6).view(2, 3).to(dtype)
    scope = {"torch": torch, "F": F, "put": put, "m": x > 2, "j": torch.tensor([0, 1])}
    for number in NUMBERS:
        for expression in EXPRESSIONS:
            text = expression.format(n=number)
            function = eval(f"lambda x: {text}", scope)
            kiln.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected, actual = result(function, x), result(kiln.compile(function), x)
            assert type(expected) is type(actual), f"{text}: {expected} and {actual}"
            if isinstance(expected, tuple):
                assert expected == actual, text
            else:
                torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m, text=text: f"{text}: {m}")
