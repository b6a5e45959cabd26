"""Control flow that depends on data, and code between graphs: branches and loops on tensors, numbers out of them, exceptions,
contexts, generators and recursion, with graph breaks anywhere, values on the stack and callers that go on."""

import random
import textwrap

import torch
import torch.nn.functional as F

import kiln
from helpers import check_calls

from .grammar import Grammar, function_of

HELPERS = """
class Scope:
    def __init__(self, log, swallow=False):
        self.log, self.swallow = log, swallow
    def __enter__(self):
        self.log.append('in')
        return self
    def __exit__(self, kind, value, trace):
        self.log.append(kind.__name__ if kind else 'out')
        return self.swallow and kind is ValueError
def broken(t):
    kiln.graph_break()
    return t * 2
def number(t):
    return t.sum().item()
def checked(t, limit=2.0):
    if t.abs().max() > limit:
        raise ValueError('too large')
    return t + 1
def halves(t, depth):
    if depth <= 0 or t.numel() < 2:
        return t.sum()
    a, b = t.flatten().chunk(2)
    return halves(a, depth - 1) * 0.5 + halves(b, depth - 1)
def pieces(t, log):
    try:
        for row in t:
            yield row * 2
            log.append(len(log))
    finally:
        log.append('closed')
def counted(t):
    total = 0
    while t.sum() > 1 and total < 5:
        t = t * 0.5
        total += 1
    return t, total
def noted(function):
    def wrapper(t, *rest, **options):
        out = function(t, *rest, **options)
        return out if options else out - 1
    return wrapper
@noted
def wrapped(t, scale=1.0):
    return t * scale
class Box:
    limit = 3
    def __init__(self, t):
        self.t = t
        self.seen = 0
    @property
    def value(self):
        self.seen += 1
        return self.t if self.seen < self.limit else broken(self.t)
    def __call__(self, t):
        return t + self.value
    def __len__(self):
        return int(self.t.sum().abs()) % 3
    def __iter__(self):
        return iter([self.t, self.t * 2])
    def __getitem__(self, k):
        return self.t[k % 3]
"""

STATEMENTS = Grammar(
    # x, y: [3, 3] float tensors; n, k: ints; log: a list of numbers and names; box: a Box
    tensor=[
        *["<leaf_tensor>"] * 5,
        *["(<tensor> + <tensor>)", "(<tensor> * <tensor>)", "<tensor>.sin()", "(<tensor> - <number>)", "F.relu(<tensor>)", "<tensor>.mT", "(<tensor> @ <tensor> * 0.3)"] * 2,
        *["broken(<tensor>)", "wrapped(<tensor>)", "wrapped(<tensor>, scale=<number>)", "checked(<tensor>, 100.0)", "box(<tensor>)", "counted(<tensor>)[0]"],
        *["(<tensor> if <condition> else <tensor>)", "torch.stack([*box]).sum(0)", "sum(pieces(<tensor>, log))", "torch.stack(list(pieces(<tensor>, log)))", "halves(<tensor>, 2)"],
        *["(lambda t: t + <number>)(<tensor>)", "max(<tensor>, <tensor>, key=number)", "[broken(t) for t in (<tensor>, y)][0]", "next(t for t in (<tensor>, y) if <condition>)"],
        *["box.value", "box[n]", "{1: <tensor>, 2: y}.get(n, x)", "(x, y)[n % 2]", "torch.tensor([<number>, 1.0, 2.0])"],
    ],
    leaf_tensor=["x", "y", "x", "box.t"],
    number=[*["n", "k", "2", "0.5"] * 3, "number(<tensor>)", "len(log)", "len(box)", "int(number(<tensor>)) % 4", "<tensor>.numel()", "counted(<tensor>)[1]", "x.sum().item()", "float(<condition>)", "(n + k)"],
    int=["n", "k", "2", "len(box)", "int(number(<tensor>)) % 3", "(x > 0).sum().item() % 4"],
    condition=[
        *["<tensor>.sum() > 0", "<tensor>.mean() < <number>", "(<tensor> > 0).any()", "n > k", "len(log) > 2", "bool((x == x).all())", "x.sum().item() > y.sum().item()", "torch.equal(x, y)", "not <tensor>.abs().max() < 1"],
        *["torch.is_grad_enabled()", "n in (1, 2)", "<tensor>.sum() > 0 and <tensor>.sum() < 3", "n or <tensor>.sum() > 0", "0 < <tensor>.sum() < 2", "box", "x is y"],
    ],
    statement=[
        *["<simple>"] * 8,
        "if <condition>:\n    <block>",
        "if (z := <tensor>).sum() > 0:\n    x = z",
        "if <condition>:\n    <block>\nelse:\n    <block>",
        "if <condition>:\n    <block>\nelif <condition>:\n    <block>\nelse:\n    <block>",
        "for step in range(<int>):\n    <block>",
        "for step in range(<int>):\n    if <condition>:\n        break\n    <block>\nelse:\n    <simple>",
        "for t in (x, y):\n    if <condition>:\n        continue\n    <block>",
        "for step, t in enumerate(pieces(<tensor>, log)):\n    if <condition>:\n        break\n    x = x + t",
        "for turn in range(4):\n    <simple>\nturns = 0\nwhile <condition>:\n    <block>\n    turns = turns + 1\n    if turns > 3:\n        break",
        "try:\n    <block>\n    x = checked(<tensor>)\nexcept ValueError as e:\n    log.append(str(e))\n    <block>",
        "try:\n    x = checked(<tensor>)\n    <simple>\nexcept ValueError:\n    <simple>\nelse:\n    <simple>\nfinally:\n    <simple>",
        "try:\n    try:\n        y = checked(<tensor>)\n    finally:\n        <block>\nexcept ValueError:\n    n = n + 1",
        "with Scope(log) as scope:\n    <block>",
        "with Scope(log, swallow=True):\n    <block>\n    x = checked(<tensor>)\n    y = x * 2",
        "with torch.no_grad():\n    <block>",
        "with torch.no_grad(), Scope(log):\n    <block>",
        "with torch.autocast('cpu', enabled=False):\n    <block>",
        "if <condition>:\n    return x, log",
        "def inner(t):\n    nonlocal n\n    n = n + 1\n    if t.sum() > 0:\n        return broken(t)\n    return t + x\ny = inner(<tensor>)",
        "def gen():\n    got = yield x\n    while got is not None:\n        got = yield got * 2\nstream = gen()\nx = next(stream) + stream.send(y)",
    ],
    block=["<simple>", "<simple>\n<simple>"],
    simple=[
        *["x = <tensor>"] * 5,
        *["y = <tensor>"] * 3,
        *["n = <int>", "k = <int>", "log.append(<number>)", "log.append(round(number(x), 2))", "kiln.graph_break()", "print('', end='')", "x, y = y, <tensor>", "x = x.clone()\nx[0] = <number>", "x += <tensor>", "box = Box(<tensor>)", "box.t = <tensor>"],
        *["assert not torch.isnan(x).any(), 'nan'", "log.append(x.shape == y.shape)", "log.append(f'{n}')", "x = wrapped(x) + (broken(y) * n + wrapped(y, scale=k))", "log += [n, k]", "del log[2:]", "y = torch.cat([x.flatten(), y.flatten()])[:3]"],
        "x = x * (y.sum() > 0) + broken(x) if x.sum() > 0 else y - n",
        "log.append([broken(t).sum().item() > 0 for t in (x, y)])",
        "n = {True: 1, False: 2}[bool(x.sum() > 0)]",
        "x.grad_fn",
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    body = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(2, 7)))
    result = r.choice(["x, y, n, log", "x, log", "x * y, box.seen, log", "[x, log], k", "broken(x), n"])
    lines = f"log = []\n{body}\nreturn {result}\n"
    return HELPERS + "def f(x, y, box, n, k):\n" + textwrap.indent(lines, "    ")


def run(seed):
    scope = {"torch": torch, "F": F, "kiln": kiln}
    function = function_of(program(seed), f"<control {seed}>", scope)
    r = random.Random(seed)
    grad = r.random() < 0.4

    def outer(x, y, n, k, times=1):
        box = scope["Box"](y * 0.5)
        return function(x, y, box, n, k), box.seen, box.t

    def arguments(seed):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        x, y = (torch.randn(3, 3, generator=g) * r.choice([0.5, 1, 3]) for _ in range(2))
        return [x.requires_grad_(grad), y.requires_grad_(grad and r.random() < 0.5), r.randrange(4), r.randrange(3)]

    calls = [arguments(r.randrange(10**6)) for _ in range(5)]
    check_calls(outer, [*calls, calls[0]], rtol=1e-3, atol=1e-3)
