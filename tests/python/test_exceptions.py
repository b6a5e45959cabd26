"""Exceptions that captured code raises and catches: their attributes, tracebacks and where they come out."""

import contextlib
import sys
import traceback

import pytest
import torch

import kiln
from kiln.testing import assert_same

X = torch.linspace(-2, 2.6, 12).reshape(3, 4)


class TwoArguments(Exception):
    """Cannot be made of its `args`."""

    def __init__(self, message, tensor):
        super().__init__(message)
        self.tensor = tensor


@kiln.disable(recursive=False)
def raises_outside(x):
    raise TwoArguments("outside", x * 2)


def raised_from(x):
    try:
        raise TwoArguments("negative", x.sum())
    except TwoArguments as e:
        raise RuntimeError("wrapped") from e


def raised_while_handled(x):
    try:
        raise TwoArguments("negative", x.sum())
    except TwoArguments:
        x.mul_(2)
        raise LookupError from None


def grouped(x):
    try:
        raise ExceptionGroup("group", [ValueError("v"), TwoArguments("a", x)])
    except* ValueError:
        x.add_(1)


@pytest.mark.filterwarnings("ignore:.*a graph break while an exception is being handled")
@pytest.mark.parametrize("f", [raised_from, raised_while_handled, grouped, lambda x: raises_outside(x)])
def test_exceptions_whose_class_wants_other_arguments(f):
    """super().__init__ on the stack of a frame that goes on is that of the base."""
    compiled = kiln.compile(f)
    for _ in range(2):
        given, wanted = torch.ones(2), torch.ones(2)
        with pytest.raises(Exception) as expected:
            f(wanted)
        with pytest.raises(type(expected.value)) as raised:
            compiled(given)
        assert repr(raised.value) == repr(expected.value)
        assert_same(getattr(raised.value, "tensor", None), getattr(expected.value, "tensor", None))
        assert_same(given, wanted)


def test_methods_of_a_base_behind_a_break():
    class Items(list):
        def append(self, item):
            super().append(item if item.sum() > 0 else -item)

    def f(x):
        items = Items()
        items.append(x)
        items.append(-x)
        return list(items), len(items)

    assert_same(kiln.compile(f)(torch.ones(2)), f(torch.ones(2)))


class KeepsTraceback:
    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        self.told = tb is not None and tb.tb_lineno > 0
        return True


class AsksForTraceback:
    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        self.given = tb is not None
        return True


def formatted(x):
    try:
        raise ValueError("v")
    except ValueError:
        text = traceback.format_exc()
    return x + 1, text


def formatted_chain(x):
    try:
        try:
            raise ValueError("v")
        except ValueError as e:
            raise RuntimeError("r") from e
    except RuntimeError as e:
        text = "".join(traceback.format_exception(e))
    return x + 1, text


def asked(x):
    try:
        raise ValueError("v")
    except ValueError as e:
        there, info = e.__traceback__ is not None, sys.exc_info()[2] is not None
    return x + 1, there, info


def kept_by_exit(x):
    with KeepsTraceback() as keeps:
        raise KeyError("k")
    return x + 1, keeps.told


def asked_by_exit(x):
    with AsksForTraceback() as asks:
        raise KeyError("k")
    return x + 1, asks.given


def suppressed(x):
    with contextlib.suppress(KeyError), contextlib.ExitStack():
        raise KeyError("k")
    return x + 1


def kept(x):
    errors = []
    for i in range(3):
        try:
            raise ValueError(i)
        except ValueError as e:
            errors.append(e)
    return x + len(errors), [repr(e) for e in errors], errors[-1]


@pytest.mark.filterwarnings("ignore:.*a graph break while an exception is being handled")
@pytest.mark.parametrize("f", [formatted, formatted_chain, asked, kept_by_exit, asked_by_exit, suppressed])
def test_tracebacks_are_there(f):
    compiled = kiln.compile(f)
    for _ in range(2):
        assert_same(compiled(X), f(X))
    if f in (asked, asked_by_exit, suppressed):
        assert_same(kiln.compile(f, fullgraph=True)(X), f(X))


def test_exceptions_that_are_kept_have_their_tracebacks():
    y, texts, last = kiln.compile(kept)(X)
    assert_same((y, texts), kept(X)[:2])
    assert last.__traceback__.tb_frame.f_code.co_name == "kept"


def test_an_exception_that_existed_gets_its_traceback():
    def f(x, error):
        try:
            raise error
        except ValueError:
            return x + 1

    error = ValueError("old")
    assert_same(kiln.compile(f)(X, error), X + 1)
    assert error.__traceback__.tb_frame.f_code.co_name == "f"
