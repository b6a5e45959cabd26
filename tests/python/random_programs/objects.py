"""Python's objects and control flow: what capture makes of names, attributes, containers, closures, branches and loops, and
what guards make of calls with other arguments."""

import random
import textwrap

import torch
from torch import nn

import kiln
from helpers import outcome
from kiln.testing import difference

from .grammar import Grammar, function_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.linear(x) if x.shape[-1] == 3 else x


class Thing:
    kind = "thing"

    def __init__(self):
        self.n = 1
        self.t = torch.ones(3)
        self.l = [1, 2]  # noqa: E741
        self.d = {"a": 1, "b": torch.zeros(3)}
        self.o = None

    def bump(self, k=1):
        self.n += k
        return self.n

    @property
    def twice(self):
        return self.n * 2


STATEMENTS = Grammar(
    tensor=[
        *["<leaf_tensor>"] * 4,
        *["(<tensor> <sign> <tensor>)"] * 3,
        *["(<tensor> * <number>)"] * 2,
        *["<tensor>.abs()", "<tensor>.sin()", "<tensor>.flip(0)", "d['b']", "e['b']", "o.d['b']"],
        "torch.stack([<tensor>, <tensor>]).sum(0)",
        "sum([v for v in <list> if isinstance(v, torch.Tensor)], <tensor>)",
        "(<tensor> if <condition> else <tensor>)",
    ],
    leaf_tensor=["x", "y", "o.t", "p.t"],
    number=[
        *["<leaf_number>"] * 5,
        *["(<number> <sign> <number>)"] * 2,
        *["len(<list>)", "len(<dict>)", "o.bump()", "o.twice", "p.twice", "<dict>.get(<key>, 7)", "int(<condition>)"],
        *["shared_number", "<list>.count(1)", "max(<number>, <number>)"],
    ],
    leaf_number=["n", "k", "2", "3", "o.n", "p.n"],
    sign=["+", "-", "*"],
    list=["l", "m", "o.l", "p.l", "shared_list"],
    dict=["d", "e", "o.d", "p.d"],
    thing=["o", "p"],
    key=["'a'", "'zz'", "'q'"],
    any=["<tensor>", "<number>"],
    condition=[
        *["o is p", "l is m", "d is e", "l == m", "n > k", "x is y", "o.t is x", "'q' in d", "1 in l", "o.o is p"],
        *["x.shape[0] > 2", "o.n == p.n", "isinstance(n, int)", "x.requires_grad", "d.get('b') is y", "hasattr(o, 'z')"],
        *["o.l is l", "o.d is d", "len(l) > 2", "p.o is not None"],
    ],
    block=["<simple>", "<simple>\n<simple>"],
    statement=[
        *["<simple>"] * 12,
        *["if <condition>:\n    <block>"] * 3,
        "if <condition>:\n    <block>\nelse:\n    <block>",
        *["for v in l[:3]:\n    <block>", "for v in range(2):\n    <block>", "for v in list(d)[:2]:\n    <block>"],
        "try:\n    <block>\nexcept (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError):\n    n = n + 1",
    ],
    simple=[
        *["x = <tensor>"] * 4,
        *["y = <tensor>"] * 2,
        *["n = <number>", "k = <number>", "o = <thing>", "l = <list>", "l = list(l)", "l = [*m, 3]", "l = l[::-1]"],
        *["d = <dict>", "d = dict(d)", "d = {**e}"],
        *["<list>.append(<any>)", "<list>.pop()", "<list>.extend(l[:2])", "<list>.extend([n, k])", "<list>[0] = <any>", "l[-1:] = [n]"],
        *["<dict>[<key>] = <any>", "<dict>[n] = <number>", "<dict>.pop(<key>, None)"],
        *["<thing>.n = <number>", "<thing>.t = <tensor>", "<thing>.o = <thing>", "<thing>.o = None", "<thing>.z = <number>"],
        *["<thing>.bump(<number>)", "<leaf_tensor>.add_(<tensor>.detach())", "x[0] = 4", "y = x.view(-1)"],
        "shared_number = <number> % 50",
        *["print('', end='')", "kiln.graph_break()"],
        "def inner(a, b=n):\n    return a * b + <leaf_number>\nx = inner(x)",
        "def add(v, to=l):\n    to.append(v)\n    return len(to)\nn = add(<number>)",
        "cell = [n]\ndef store(v):\n    cell[0] = v\n    return v + k\nk = store(<number>)\nn = cell[0]",
        "rest = (v for v in <list> if not isinstance(v, str))\nnext(rest, None)\nm = list(rest)",
        "with torch.no_grad():\n    y = <tensor>",
        "class Local(Thing):\n    kind = <number>\nq = Local()\nq.n = n\no = q if k > 1 else o",
        *["x = net(<tensor>)", "net.count = net.count + n\nn = net.count", "x = x + net.total\nnet.total = x.detach()"],
        *["first, *m = [*<list>, n, k]", "l = [v for v in <list> if not isinstance(v, int) or v != 2]"],
        "d = {key: value for key, value in <dict>.items() if key != <key>}",
        "l = sorted([v for v in l if isinstance(v, int)], key=lambda v: -v)",
        "s = f'{n}-{k}-{len(l)}'\nd[s] = len(s)",
        "cache.setdefault(<key>, []).append(<number>)\nn = len(cache)",
        "while n < 3:\n    n = n + 1\n    x = x + n",
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    body = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(3, 9)))
    result = STATEMENTS.text(r, "tensor")
    lines = f"global shared_number\n{body}\nreturn {result}, n, k, l, d, o.n, p.n\n"
    return "def f(x, y, l, m, d, e, o, p, n, k):\n" + textwrap.indent(lines, "    ")


def arguments(seed):
    """Lists, dicts and things that may be one, or hold each other's parts."""
    r = random.Random(seed)

    def vector(size=3):
        return torch.randn(size, generator=torch.Generator().manual_seed(r.randrange(1000)))

    x = vector()
    if r.random() < 0.15:
        x.requires_grad_()
        x = x * 1.0 if r.random() < 0.5 else x
    y = r.choice([x, x.detach()[:], *[vector(r.choice([3, 3, 3, 1])) for _ in range(4)]])

    def made_list():
        return [r.choice([1, 2, 1.5, "s", torch.ones(3), x, True, None]) for _ in range(r.randrange(4))]

    def made_dict():
        made = {"a": r.choice([1, 2, 2.5]), "b": r.choice([torch.ones(3), x, y])}
        if r.random() < 0.3:
            made["q"] = r.choice([1, torch.zeros(3)])
        return made

    l = made_list()  # noqa: E741
    m = l if r.random() < 0.3 else made_list()
    d = made_dict()
    e = d if r.random() < 0.3 else made_dict()
    o = Thing()
    p = o if r.random() < 0.3 else Thing()
    for thing in (o, p):
        for name, values in {"n": range(4), "t": [x, y], "l": [l, m], "d": [d, e], "o": [o, p], "z": [1]}.items():
            if r.random() < 0.2:
                setattr(thing, name, r.choice(values))
    return x, y, l, m, d, e, o, p, r.randrange(4), r.choice([1, 2, 2.5])


def picture(value, seen):
    """What can be seen of a value, in plain containers; an object that was seen before is its number."""
    if isinstance(value, torch.Tensor | list | tuple | dict | Thing):
        if id(value) in seen:
            return "seen", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return "overflow"
        return value.detach().clone(), value.requires_grad
    if isinstance(value, dict):
        return [(key, picture(v, seen)) for key, v in value.items()]
    if isinstance(value, Thing):
        return type(value).__name__, picture(vars(value), seen)
    if isinstance(value, list | tuple):
        return [type(value).__name__, *[picture(v, seen) for v in value]]
    return value


def pictures(function, scope, calls):
    """What some calls in a row do, with their arguments and globals as they are then."""
    found = []
    for seed in calls:
        args = arguments(seed)
        result = outcome(function, args, {})[0]
        if result[0] == "raised" and issubclass(result[1], RecursionError):
            raise result[1]
        seen = {}
        state = [scope["shared_list"], scope["shared_number"], scope["cache"], scope["net"].count, scope["net"].total]
        told = picture(result[1], seen) if result[0] == "returned" else (result[1].__name__, result[2][:60])
        found.append([result[0], told, picture(args, seen), picture(state, seen)])
        del scope["shared_list"][4:]
    return found


def run(seed):
    r = random.Random(seed + 1)
    calls = [r.randrange(10**6) for _ in range(6)]
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        scope = {"torch": torch, "kiln": kiln, "Thing": Thing, "net": Net()}
        scope |= {"shared_list": [1], "shared_number": 5, "cache": {}}
        function = function_of(program(seed), f"<objects {seed}>", scope)
        found.append(pictures(kiln.compile(function) if compiled else function, scope, calls))
    for number, (expected, actual) in enumerate(zip(*found)):
        text = difference(expected, actual, rtol=1e-3, atol=1e-3, path=f"call {number}")
        assert text is None, text
