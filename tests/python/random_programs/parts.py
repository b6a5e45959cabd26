"""Writes to parts of tensors: arguments (with gaps, transposed) and temporaries, at fixed and at computed places, with
reads in between, and in every other program indices that may be out of range."""

import random

import torch

from helpers import check_calls

from .grammar import function_of

SHAPE = (6, 8, 5)
IN_BOUNDS = torch.tensor([4, 0, 3, 0])
WRITES = {  # of a view `x` with `n` rows of shape `rest`, all in all `size` elements
    "set": "{x}[...] = k[{small}:][:{size}].reshape({shape})",
    "add": "{x}.add_({number})",
    "fill": "{x}.fill_({number})",
    "scale": "{x}.mul_({other}.mean())",
    "mask": "{x}[{x} > 0.3] = 0.25",
    "own": "{x}.copy_({x}.flip(0) * 0.5)",
    "move": "{x}.reshape(-1)[:{two}] = {other}.reshape(-1)[:{two}] * 2",
    "rows": "{x}[i[:{few}] % {n}] = {number}",
    "put": "{x}[i[:{few}] % {n}] = torch.full(({few}, *{rest}), {number}) * k[0]",
    "put own": "{x}[i[:{few}] % {n}] += {x}[i[:1] % {n}] * 0.5",
    "copy rows": "{x}.index_copy_(0, torch.arange(min(3, {n})), torch.full((min(3, {n}), *{rest}), {number}))",
    "add rows": "{x}.index_add_(0, i[:2] % {n}, torch.full((2, *{rest}), {number}) * k[1])",
    "add scaled rows": "{x}.index_add_(0, i[:2] % {n}, torch.full((2, *{rest}), {number}) * k[1], alpha={number})",
    "add put": "{x}.index_put_((i % {n},), torch.full((4, *{rest}), {number}), accumulate=True)",
    "fill rows": "{x}.index_fill_(0, i[:{few}] % {n}, {number})",
    "numbers": "{x}.put_(i[:{few}] % {size}, k[:{few}] * {x}.reshape(-1)[-1], accumulate={number} > 0.3)",
    "scatter": "{x}.scatter_(0, (i[:1] % {n}).view({ones}).expand(1, *{rest}), torch.full((1, *{rest}), {number}))",
    "scatter add": "{x}.scatter_add_(0, (i[:1] % {n}).view({ones}).expand(1, *{rest}), torch.full((1, *{rest}), {number}))",
}
WITHOUT_ROWS = ["set", "add", "fill", "scale"]  # a number's


class Writer:
    """Writes a program and runs it line by line, to know the shapes of its views."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines, self.results = [], []
        self.scope = {"torch": torch, "i": IN_BOUNDS, "k": torch.rand(240)}
        self.scope |= {"c": torch.rand(SHAPE), "e": torch.rand(SHAPE)}

    def run(self, line):
        self.lines.append(line)
        exec(line, self.scope)

    def view(self, text):
        """An expression of views of the variable `text`, and what it is now."""
        r = self.random
        for _ in range(r.randrange(4)):
            t = eval(text, self.scope)
            if t.dim() == 0:
                break
            dim = r.randrange(t.dim())
            size = t.shape[dim]
            kind = r.choice(["narrow", "select", "transpose", "unsqueeze", "view", "step", "diagonal"])
            if kind == "narrow":
                start = r.randrange(size)
                text += f".narrow({dim}, {start}, {r.randint(1, size - start)})"
            elif kind == "select" and t.dim() > 1:
                text += f".select({dim}, {r.randrange(-size, size)})"
            elif kind == "transpose" and t.dim() > 1:
                text += f".transpose(0, {dim})"
            elif kind == "unsqueeze":
                text += f".unsqueeze({dim})"
            elif kind == "view" and t.is_contiguous() and "transpose" not in text:
                text += ".flatten()"
            elif kind == "diagonal" and t.dim() > 1:
                other = (dim + r.randrange(1, t.dim())) % t.dim()
                offset = r.randrange(1 - size, t.shape[other])
                text += f".diagonal({offset}, {dim}, {other})"
            elif kind == "step" and size > 2:
                text += f"[{':, ' * dim}{r.randrange(2)}::2]"
        return text, eval(text, self.scope)

    def write(self, variables):
        r = self.random
        x, t = self.view(r.choice(variables))
        rest = tuple(t.shape[1:])
        words = {
            "x": x,
            "n": t.shape[0] if t.dim() else 1,
            "rest": rest,
            "ones": (1,) * t.dim(),
            "shape": tuple(t.shape),
        }
        words |= {"size": t.numel(), "small": r.randrange(4), "few": r.randint(1, 3), "number": round(r.random(), 3)}
        words["other"], other = self.view(r.choice(variables))
        words["two"] = min(2, t.numel(), other.numel())
        kind = r.choice(list(WRITES) if t.dim() else WITHOUT_ROWS)
        self.run(WRITES["fill" if kind == "set" and t.numel() > 230 else kind].format(**words))

    def read(self, variables):
        x, t = self.view(self.random.choice(variables))
        name = f"r{len(self.lines)}"
        form = self.random.choice(["{x}.sum(-1)", "{x}.clone()", "{x} * 2 + 1"])
        self.run(f"{name} = " + form.format(x=x))
        self.results.append(self.random.choice([name, f"{name}.exp()"]))

    def program(self, raises):
        r = self.random
        self.run("local = " + r.choice(["torch.zeros(6, 8, 5)", "e * 2", "torch.tanh(e) @ torch.ones(5, 5)"]))
        variables = r.choice([["c"], ["c", "e", "local"], ["c", "e", "local"], ["local"]])
        for _ in range(r.randint(1, 7)):
            (self.write if r.random() < 0.75 else self.read)(variables)
            if raises and r.random() < 0.3:
                self.run(f"p{len(self.lines)} = k[j]")
                self.results.append(self.lines[-1].split()[0])
        self.results += r.sample(["local", "torch.tanh(c)"], r.randrange(3))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def f(c, e, k, i, j):\n{body}    return [{', '.join(self.results)}]\n"


def program(seed):
    writer = Writer(seed)
    writer.scope["j"] = IN_BOUNDS
    return writer.program(raises=seed % 2 == 1)


def arguments(seed, j):
    g = torch.Generator().manual_seed(seed)
    kind = seed // 2 % 3
    if kind == 0:
        c = torch.rand(SHAPE, generator=g)
    elif kind == 1:
        c = torch.rand(8, 6, 5, generator=g).transpose(0, 1)
    else:
        c = torch.rand(7, 9, 6, generator=g)[1:, 1:, 1:]
    i = torch.randint(0, 5, (4,), generator=g)
    return [c, torch.rand(SHAPE, generator=g), torch.rand(240, generator=g), i, j]


def run(seed):
    function = function_of(program(seed), f"<parts {seed}>", {"torch": torch})
    out_of_bounds = torch.tensor([0, 1, 1000, 2])
    check_calls(function, [arguments(seed, j) for j in (IN_BOUNDS, out_of_bounds, IN_BOUNDS)], rtol=1e-4, atol=1e-5)
