"""Python's own library and classes as model code uses them: containers, iterators, data classes, enums, descriptors, context
managers, matching, text and numbers."""

import random
import textwrap

import torch
import torch.nn.functional as F

import kiln
from helpers import compare_call

from .grammar import Grammar, function_of

HELPERS = """
import abc, bisect, collections, contextlib, copy, dataclasses, enum, functools, heapq, inspect, itertools, logging, math, operator
import re, string, types, typing, warnings
import numpy as np
from collections import OrderedDict, defaultdict, deque, namedtuple, Counter, ChainMap
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Optional

Pair = namedtuple("Pair", "a b", defaults=[1])
class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"
    @classmethod
    def of(cls, n):
        return cls.SUM if n % 2 else cls.MEAN
class Flags(enum.IntFlag):
    A = 1
    B = 2
class Named(NamedTuple):
    t: torch.Tensor
    n: int = 2
    def scaled(self):
        return self.t * self.n
@dataclass
class Config:
    size: int = 3
    rate: float = 0.5
    names: list = field(default_factory=list)
    mode: Mode = Mode.SUM
    def __post_init__(self):
        self.names.append(self.size)
    @property
    def scale(self):
        return self.size * self.rate
@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int = 0
@dataclass
class Output:
    hidden: torch.Tensor
    loss: Optional[torch.Tensor] = None
    def __getitem__(self, k):
        return (self.hidden, self.loss)[k]
class Base(abc.ABC):
    registry = {}
    def __init_subclass__(cls, key=None, **rest):
        super().__init_subclass__(**rest)
        Base.registry[key] = cls
    @abc.abstractmethod
    def run(self, t): ...
    def twice(self, t):
        return self.run(self.run(t))
class Half(Base, key="half"):
    def run(self, t):
        return t * 0.5
class Shift(Base, key="shift"):
    __slots__ = ("by",)
    def __init__(self, by=1):
        self.by = by
    def run(self, t):
        return t + self.by
    def twice(self, t):
        return super().twice(t) - 1
class Clamp:
    def __set_name__(self, owner, name):
        self.name = "_" + name
    def __get__(self, o, kind=None):
        return self if o is None else getattr(o, self.name, 1)
    def __set__(self, o, value):
        setattr(o, self.name, min(value, 5))
class Bag:
    level = Clamp()
    def __init__(self, **items):
        self.__dict__.update(items)
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return len(name)
    def __contains__(self, k):
        return k in self.__dict__
    def __eq__(self, other):
        return isinstance(other, Bag) and self.__dict__.keys() == other.__dict__.keys()
    def __hash__(self):
        return hash(tuple(self.__dict__))
    def __add__(self, other):
        return other * self.level
    __radd__ = __add__
    def __len__(self):
        return len(self.__dict__)
    def __iter__(self):
        return iter(self.__dict__.items())
    @classmethod
    def made(cls, n):
        return cls(n=n)
    @staticmethod
    def area(a, b):
        return a * b
    @functools.cached_property
    def cached(self):
        return len(self) * 10
@contextlib.contextmanager
def level(log, n):
    log.append(n)
    try:
        yield n * 2
    finally:
        log.append(-n)
@functools.lru_cache(maxsize=None)
def table(n):
    return tuple(range(n))
@functools.singledispatch
def kind(v):
    return 0
@kind.register
def _(v: int):
    return v + 1
@kind.register
def _(v: str):
    return len(v)
def options(t, /, a=1, *rest, b=2, **more):
    return t * a + b + sum(rest) + sum(more.values())
def repeat(times):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for _ in range(times):
                out = function(*args, **kwargs)
            return out
        return wrapper
    return decorate
@repeat(times=2)
def bump(box):
    box.size += 1
    return box.size
"""

STATEMENTS = Grammar(
    # x, y: [3, 4] tensors; n, k: ints; l: list of ints; s: text; c: a Config; log: a list
    tensor=[
        *["x", "y", "x", "y"] * 2,
        *["(<tensor> + <tensor>)", "(<tensor> * <number>)", "<tensor>.sin()"] * 2,
        *["Named(<tensor>, n).scaled()", "Output(<tensor>).hidden", "Output(<tensor>, y)[1]", "Base.registry[<kind>]().twice(<tensor>)", "(Bag(level=n) + <tensor>)", "replace(Output(<tensor>), loss=x).loss"],
        *["functools.reduce(operator.add, [<tensor>, y])", "functools.partial(torch.mul, <tensor>)(<number>)", "options(<tensor>, *l[:2], b=n)", "options(<tensor>, **{'b': n, 'q': k})", "operator.itemgetter('t')({'t': <tensor>})", "operator.attrgetter('mT')(<tensor>).mT"],
        *["getattr(torch, <activation>)(<tensor>)", "getattr(F, 'relu')(<tensor>)", "{'sum': torch.add, 'mean': torch.sub}[c.mode.value](<tensor>, y)", "copy.copy(Named(<tensor>)).t", "Pair(<tensor>)._replace(b=2).a", "Pair(*[<tensor>, n])._asdict()['a']"],
        *["sum(map(lambda t: t * 2, (<tensor>, y)))", "torch.stack(list(itertools.islice(itertools.repeat(<tensor>), 2))).sum(0)", "max([<tensor>, y], key=lambda t: t.shape[0])", "next(iter(deque([<tensor>])))", "OrderedDict(a=<tensor>, b=y).popitem()[1]", "ChainMap({'a': <tensor>}, {'b': y})['b']", "types.SimpleNamespace(t=<tensor>).t", "(lambda *a, **k: a[0])(<tensor>, y)"],
        *["torch.einsum('ij,ij->ij', <tensor>, y)", "<tensor>.reshape(math.prod(<tensor>.shape)).view(3, 4)", "torch.cat([*(t[None] for t in (<tensor>, y))]).mean(0)", "sum([t for t, _ in zip((<tensor>, y), l)], x)"],
    ],
    activation=["'tanh'", "'relu'", "'sigmoid'"],
    kind=["'half'", "'shift'"],
    number=[
        *["n", "k", "2", "0.5", "n"] * 3,
        *["len(l)", "sum(l)", "c.size", "c.rate", "c.scale", "len(s)", "max(l, default=1)", "min(n, k)", "abs(-n)", "n ** 2", "n // 2", "divmod(n + 7, 3)[1]", "int(s.isdigit())", "(n << 1)", "round(c.rate * 3, 1)", "pow(2, n % 4)"],
        *["math.sqrt(n + 1)", "math.floor(2.5 + n)", "math.gcd(6, n)", "math.log2(k + 1)", "math.comb(4, 2)", "int(np.prod((2, 3)))", "float(np.float32(0.5))", "math.isclose(0.1 + 0.2, 0.3)", "math.inf if n > 90 else 1"],
        *["Counter(l)[1]", "sum(1 for v in l if v > 1)", "len(set(l))", "bisect.bisect(sorted(l), n)", "heapq.nsmallest(1, [*l, 5])[0]", "next(itertools.count(n))", "sum(itertools.accumulate(l))", "len(list(itertools.product(l, 'ab')))", "sum(a * b for a, b in zip(l, range(5)))"],
        *["kind(n)", "kind(s)", "len(table(n % 4))", "Mode.of(n).value.count('m')", "int(Flags.A | Flags.B)", "Point(n, 2).y", "dataclasses.asdict(Point(n))['x']", "hash(Point(1, 2)) == hash(Point(1, 2))", "len(inspect.signature(options).parameters)", "Bag(a=1).zzz", "Bag.area(n, 2)", "len(Bag.made(n))", "Bag(a=1, b=2).cached", "bump(c)", "len(dir(Point)) > 3", "operator.mul(n, 3)", "id(l) == id(l)"],
        *["len(re.findall('[a-z]', s))", "s.find('b')", "ord(s[0])", "len(s.split('_'))", "len(f'{n:03d}{s!r:>8}')", "len('%s-%d' % (s, n))", "len('{} {k}'.format(n, k=s))", "len(string.ascii_lowercase)", "int('12') + n", "float('1e1')", "len(repr(l))", "len(str(c.mode))", "len(s.join(['a', 'b']))", "len(s.replace('a', '').title())"],
    ],
    condition=[
        *["n > k", "1 in l", "'a' in s", "c.mode is Mode.SUM", "c.mode == Mode('mean')", "Point(1) < Point(n)", "isinstance(c, Config)", "all(v >= 0 for v in l)", "any(l)", "not l", "callable(kind)", "hasattr(c, 'zz')", "issubclass(Half, Base)", "Bag(a=1) == Bag(a=2)", "'a' in Bag(a=1)", "s.startswith(('a', 'x'))", "type(n) is int", "n in range(0, 4, 2)", "{n} <= set(l)", "Flags.A in Flags(n % 4)", "dataclasses.is_dataclass(c)", "(n, k) == (1, 1)", "l == sorted(l)", "x.dtype in (torch.float32, torch.int64)", "c.names is log", "bool(Bag())"],
    ],
    statement=[
        *["<simple>"] * 8,
        "if <condition>:\n    <simple>\nelse:\n    <simple>",
        "for v in <iterable>:\n    log.append(str(v))",
        "for i, (a, b) in enumerate(itertools.zip_longest(l, [1, 2], fillvalue=0)):\n    x = x + a * b + i",
        "for a, b in itertools.pairwise([n, *l]):\n    log.append(a - b)",
        "for key, group in itertools.groupby(sorted(l), key=lambda v: v % 2):\n    log.append((key, len(list(group))))",
        "match (n, s):\n    case (0, _):\n        x = x * 2\n    case (1 | 2, text) if text:\n        x = x + len(text)\n    case (v, str() as text):\n        x = x - v\n    case _:\n        x = y",
        "match l:\n    case []:\n        n = 0\n    case [v]:\n        n = v\n    case [v, *rest]:\n        n = v + len(rest)",
        "match {'kind': s, 'n': n}:\n    case {'kind': 'ab', **rest}:\n        log.append(rest)\n    case {'n': int(v)}:\n        log.append(v)",
        "match Point(n % 2, k):\n    case Point(x=0, y=v):\n        log.append(v)\n    case Point(1, 1):\n        log.append('one')",
        "with level(log, n) as v:\n    x = x + v",
        "with contextlib.ExitStack() as stack:\n    stack.enter_context(level(log, 1))\n    stack.callback(log.append, 'done')\n    x = <tensor>",
        "with contextlib.suppress(KeyError, ZeroDivisionError):\n    log.append({}[n])",
        "with contextlib.nullcontext(n) as v:\n    log.append(v)",
        "try:\n    log.append(10 // (n - 1))\nexcept ZeroDivisionError as e:\n    log.append(str(e))",
        "try:\n    Point(1).x = 2\nexcept dataclasses.FrozenInstanceError:\n    log.append('frozen')",
        "try:\n    (a, b), *rest = [(n, k), *l]\n    log.append((a, b, rest))\nexcept ValueError:\n    log.append('short')",
        "shared = shared + n\nlog.append(shared)",
        "class Local(Half):\n    factor = n\n    def run(self, t):\n        return super().run(t) * self.factor + __class__.factor\nx = Local().twice(x)",
    ],
    iterable=["l", "range(n % 3)", "reversed(l)", "sorted(l, reverse=True)", "zip(l, s)", "enumerate(s)", "filter(None, l)", "{1: 2, n: 3}.items()", "deque(l, maxlen=2)", "itertools.chain(l, s)", "itertools.combinations(l, 2)", "s", "Mode", "Bag(a=1, b=2)", "dict.fromkeys(l, 0)", "OrderedDict([(1, 2), (0, 1)])", "set([n])", "table(3)", "itertools.permutations([1, 2])", "map(str, l)", "itertools.starmap(pow, [(2, 3), (n, 2)])", "itertools.takewhile(lambda v: v < 2, l)"],
    simple=[
        *["x = <tensor>"] * 6,
        *["y = <tensor>"] * 2,
        *["n = int(<number>) % 7", "k = int(<number>) % 5", "log.append(<number>)", "log.append(<condition>)", "c.size = int(<number>) % 9", "c = replace(c, rate=0.25)", "c = Config(n, names=log)", "c.mode = Mode.of(n)", "l = [*l, n][-4:]", "l = sorted(set(l))", "s = s.upper()", "s = f'{s}_{n}'[:6]", "s = ''.join(reversed(s))"],
        *["d = defaultdict(list)\nd[n].append(k)\nd[s].append(1)\nlog.append(dict(d))", "q = deque([1, 2], maxlen=2)\nq.append(n)\nq.rotate(1)\nlog.append(list(q))", "h = [3, 1]\nheapq.heappush(h, n)\nlog.append(heapq.heappop(h))", "t = Counter(s)\nt.update('ab')\nlog.append(t.most_common(1)[0][1])", "b = Bag(level=n)\nb.level = k + n\nlog.append(b.level)", "p = Pair(n)\na, b = p\nlog.append((a, b, p._fields, p == (n, 1)))"],
        *["log.append([v * 2 for v in l if v])", "log.append({k: v for k, v in zip(s, l)})", "log.append(sorted({*l, n}))", "log.append(tuple(v for row in [l, l] for v in row)[:3])", "log.sort(key=str)", "log.append(slice(1, n).indices(5))", "log.append(Named(n).n)", "log.extend(itertools.islice(itertools.cycle(l or [1]), 3))", "log.append(str(Point(n)))", "log.append(repr(Mode.SUM))", "log.append(dataclasses.astuple(Point(n, k)))", "del log[5:]", "log.append(c == Config(c.size))", "log.insert(0, type(c).__name__)", "vars(c)['extra'] = n", "log.append(sorted(vars(c)))", "setattr(c, 'rate', n / 2)", "log.append(np.arange(n)[::-1].tolist())", "log.append(isinstance(x, torch.Tensor) and x.shape[-1])", "warnings.warn('careful')", "logging.getLogger('quiet').debug('x %s', n)", "l, s = l[::-1], s[1:] + s[:1]"],
        "kiln.graph_break()",
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    body = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(3, 9)))
    lines = f"global shared\nlog = []\n{body}\nreturn x, y * n, n, k, l, s, log, [f'{{name}}={{value}}' for name, value in vars(c).items()]\n"
    return HELPERS + "shared = 1\ndef f(x, y, n, k, l, s):\n    c = Config(names=[])\n" + textwrap.indent(lines, "    ")


def run(seed):
    r = random.Random(seed)
    scopes = [{"torch": torch, "F": F, "kiln": kiln} for _ in range(2)]  # each side has its own classes and globals
    eager, other = (function_of(program(seed), f"<library {seed}>", scope) for scope in scopes)
    compiled = kiln.compile(other)

    def arguments(seed):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        x, y = (torch.randn(3, 4, generator=g) for _ in range(2))
        l = [r.randrange(4) for _ in range(r.randrange(4))]  # noqa: E741
        return [x, y, r.choice([0, 1, 1, 2, 3]), r.randrange(4), l, r.choice(["ab", "ab", "xy_z", "A"])]

    calls = [arguments(r.randrange(10**6)) for _ in range(5)]
    for number, args in enumerate([*calls, calls[0]]):
        compare_call(eager, compiled, args, f"call {number}", 1e-3, 1e-3, loose=True)
