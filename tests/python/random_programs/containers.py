"""Containers and objects that may be one another: what a call writes to one of them, and perhaps puts back, another name may
show, also in a later call where two names are of one object for the first time."""

import collections
import random
import textwrap

import torch

import kiln
from helpers import outcome
from kiln.testing import difference

from .grammar import Grammar, function_of


class Thing:
    pass


NAMES = {"c": ["a", "b", "c"], "d": ["a", "b", "c"], "k": ["1", "2", "3"], "j": ["1", "2", "3"]}
RULES = {
    "list": {
        "write": [
            *["$c.append($k)", "$c.append(x.sum())", "$c.insert(0, $k)", "$c.extend($d)", "$c += [$k]", "$c[:] = [$k]"],
            *["if $c:\n    $c.pop()", "if $c:\n    $c[0] = $k", "$c.reverse()", "$c.clear()", "list(map($c.append, [$k]))"],
        ],
        "read": [
            *["y += sum($c)", "y += len($c)", "y += $c[0] if $c else 0", "y += $k in $c", "y += $c is $d", "y += $c == $d"],
            *["y += $c[-1] if len($c) > 1 else 0", "y += sum(v for v in $c)", "y += max($c, default=0)"],
        ],
        "undone": [
            *["$c.append($k)\n<read>\n$c.pop()", "$c += [$k]\n<read>\ndel $c[-1]", "$c.reverse()\n<read>\n$c.reverse()"],
            "$c.insert(0, $k)\n<read>\n$c.pop(0)",
        ],
    },
    "deque": {
        "write": [
            *["$c.append($k)", "$c.appendleft($k)", "$c.extend($d)", "$c.rotate(1)", "if $c:\n    $c.pop()"],
            "if $c:\n    $c.popleft()",
        ],
        "read": ["y += sum($c)", "y += len($c)", "y += $c[0] if $c else 0", "y += $k in $c", "y += $c is $d"],
        "undone": ["$c.rotate(1)\n<read>\n$c.rotate(-1)", "$c.appendleft($k)\n<read>\n$c.popleft()"],
    },
    "dict": {
        "write": [
            *["$c[$k] = $j", "$c.pop($k, 0)", "$c.update($d)", "$c.setdefault($k, $j)", "$c |= {$k: $j}", "$c.clear()"],
            "if $c:\n    $c.popitem()",
        ],
        "read": [
            *["y += $c.get($k, 0)", "y += sum($c.values())", "y += len($c)", "y += $k in $c", "y += $c is $d"],
            "y += next(iter($c), 0)",
        ],
        "undone": ["$c[4] = $j\n<read>\ndel $c[4]", "$c |= {4: $j}\n<read>\n$c.popitem()"],
    },
    "set": {
        "write": ["$c.add($k)", "$c.discard($k)", "$c.update($d)", "$c |= {$k}", "$c -= {$k}"],
        "read": ["y += len($c)", "y += $k in $c", "y += sum($c)", "y += len($c & $d)", "y += $c is $d"],
        "undone": ["$c.add(4)\n<read>\n$c.discard(4)", "$c |= {4}\n<read>\n$c -= {4}"],
    },
    "thing": {
        "write": [
            *["$c.p = $k", "$c.q = $c.p", "$c.p += $k", "$c.r = $k", "setattr($c, 'q', $k)", "$c.__dict__.pop('r', 0)"],
            *["$c.__dict__['p'] = $k", "$c.__dict__.update(p=$k)", "if hasattr($c, 'r'):\n    del $c.r"],
        ],
        "read": [
            *["y += $c.p", "y += $c.q", "y += getattr($c, 'r', 7)", "y += len($c.__dict__)", "y += vars($c)['q']"],
            "y += $c is $d",
        ],
        "undone": ["$c.p += 1\n<read>\n$c.p -= 1", "$c.s = 1\n<read>\ndel $c.s", "$c.__dict__['p'] += 1\n<read>\n$c.p -= 1"],
    },
}  # fmt: skip


def program(seed):
    r = random.Random(seed)
    grammar = Grammar(statement=["<write>", "<undone>", "<read>", "<read>"], **RULES[r.choice(list(RULES))])
    body = "\n".join(grammar.text(r, "statement", NAMES) for _ in range(r.randrange(2, 6)))
    return "def f(x, a, b, c):\n" + textwrap.indent(f"y = 0\n{body}\nreturn x * y + 1\n", "    ")


def container(kind, r):
    items = [r.choice([1, 2, 3]) for _ in range(r.choice([0, 1, 2, 2]))]
    if kind == "thing":
        thing = Thing()
        thing.p, thing.q = r.choice([1, 2]), r.choice([1, 2])
        return thing
    return {
        "list": list,
        "deque": lambda items: collections.deque(items, maxlen=4),
        "dict": lambda items: {i: i for i in items},
        "set": set,
    }[kind](items)


def arguments(kind, seed):
    """Often of equal contents, so that nothing but their identity tells them apart."""
    r = random.Random(seed)
    content = r.randrange(1000)
    which = r.choice([(0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0)])
    different = [container(kind, random.Random(content if r.random() < 0.7 else r.randrange(1000))) for _ in range(3)]
    return torch.ones(2), *(different[i] for i in which)


def shown(value):
    if isinstance(value, Thing):
        return list(vars(value).items())
    return list(value.items()) if isinstance(value, dict) else list(value)


def run(seed):
    r = random.Random(seed)
    kind = r.choice(list(RULES))
    function = function_of(program(seed), f"<containers {seed}>", {"torch": torch})
    compiled = kiln.compile(function)
    for call in range(8):
        found = []
        for f in (function, compiled):
            args = arguments(kind, 10 * seed + call)
            result = outcome(f, args, {})[0]
            told = result[1] if result[0] == "returned" else (result[1].__name__, result[2])
            found.append([told, [shown(c) for c in args[1:]]])
        text = difference(*found, path=f"call {call}")
        assert text is None, text
