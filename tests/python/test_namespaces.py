"""Writes to modules' variables, as attributes, globals and items of their dicts, and to what logging's messages pass."""

import builtins
import logging
import sys
import unittest

import pytest
import torch

import kiln

X = torch.ones(1)
this_module = sys.modules[__name__]
varied = 1


def item_of_builtins(x):
    builtins.__dict__["varied_builtin"] = 3
    y = x * varied_builtin  # noqa: F821
    builtins.__dict__["varied_builtin"] = 4
    return y * varied_builtin  # noqa: F821


def attribute_of_builtins(x):
    builtins.varied_builtin = 3
    y = x * varied_builtin  # noqa: F821
    builtins.varied_builtin = 4
    y = y * varied_builtin  # noqa: F821
    del builtins.varied_builtin
    try:
        return y * varied_builtin  # noqa: F821
    except NameError:
        return y + 1


def other_len(x):
    real = builtins.len
    try:
        builtins.len = lambda items: 7
        return x + len([1])
    finally:
        builtins.len = real


def item_then_global(x):
    this_module.__dict__["varied"] = 3
    y = x * varied
    globals()["varied"] = 4
    return y * varied


def update_then_attribute(x):
    vars(this_module).update(varied=5)
    y = x * varied
    this_module.varied = 6
    return y * varied * this_module.__dict__["varied"]


def attribute_then_item(x):
    names = builtins.__dict__
    setattr(builtins, "varied_builtin", 3)
    y = x * names["varied_builtin"]
    names["varied_builtin"] = 4
    return y * builtins.varied_builtin * getattr(builtins, "varied_builtin")


@pytest.mark.parametrize(
    "f",
    [
        item_of_builtins,
        attribute_of_builtins,
        other_len,
        item_then_global,
        update_then_attribute,
        attribute_then_item,
    ],
    ids=lambda f: f.__name__,
)
def test_variables_are_what_was_last_written(f):
    def run(compiled):
        this_module.varied = builtins.varied_builtin = 1
        try:
            return compiled(X).item(), this_module.varied, getattr(builtins, "varied_builtin", None)
        finally:
            builtins.__dict__.pop("varied_builtin", None)
            this_module.varied = 1

    assert run(kiln.compile(f)) == run(f)


# --- logging


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []
        self.count = 0

    def emit(self, record):
        self.messages.append(record.getMessage())
        self.count += 1


handler = Keeping()
messages = handler.messages
logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
logger.propagate = False


def reads_attribute(x):
    logger.info("a")
    return x + handler.count


def reads_list(x):
    before = len(messages)
    logger.info("a")
    return x + len(messages) - before


def asserts_logs(x):
    with unittest.TestCase().assertLogs(logger) as caught:
        logger.info("hello")
    return x + len(caught.output)


def changes_level(x):
    logger.setLevel(logging.ERROR)
    logger.info("no")
    logger.setLevel(logging.DEBUG)
    logger.info("yes")
    return x


def disables(x):
    logger.disabled = True
    logger.info("no")
    logger.disabled = False
    return x


def writes_attribute(x):
    handler.count = 100
    logger.info("a")
    return x


def other_list(x):
    handler.messages = []
    logger.info("a")
    handler.messages = messages
    return x


def own_handler(x):
    own = Keeping()
    logger.addHandler(own)
    logger.info("a")
    logger.removeHandler(own)
    return x + own.count


def own_method(x):
    said = []
    handler.emit = lambda record: said.append(record.getMessage())
    logger.info("a")
    del handler.emit
    return x + len(said)


def closure_of_a_handler():
    said = []
    own = logging.Handler()
    own.emit = lambda record: said.append(record.getMessage())
    return own, said


closing, closed_over = closure_of_a_handler()


def reads_what_a_closure_keeps(x):
    logger.addHandler(closing)
    before = len(closed_over)
    logger.info("a")
    logger.removeHandler(closing)
    return x + len(closed_over) - before


def reads_what_a_closure_kept(x):
    before = len(closed_over)
    closing_logger.info("a")
    return x + len(closed_over) - before


closing_logger = logging.getLogger(__name__ + ".closing")
closing_logger.setLevel(logging.DEBUG)
closing_logger.addHandler(closing)


def only_says(x):
    logger.info("a")
    return x + 1


LOGS = [
    reads_attribute,
    reads_list,
    asserts_logs,
    changes_level,
    disables,
    writes_attribute,
    other_list,
    own_handler,
    own_method,
    reads_what_a_closure_keeps,
    reads_what_a_closure_kept,
    only_says,
]


@pytest.mark.parametrize("f", LOGS, ids=lambda f: f.__name__)
def test_messages_come_where_they_are_given(f):
    def run(compiled):
        messages.clear()
        handler.count = 0
        logger.handlers[:] = [handler]
        return compiled(X).item(), list(messages), handler.count, logger.handlers == [handler], logger.disabled

    assert run(kiln.compile(f)) == run(f)


def test_a_message_alone_breaks_nothing():
    logger.handlers[:] = [handler]
    assert kiln.compile(only_says, fullgraph=True)(X).item() == 2
