"""One cell of a benchmark, in a process of its own: `python -m kiln.bench.worker '{"model": ..., ...}'`.

Talks in lines of JSON: says what its first call took, then measures a round whenever it is asked ("round"), and at "end" says
how much memory it needed.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MIN_STEPS = 5
# How long a round lasts, in seconds, and the most steps in it. Of small programs there are a hundred rows.
ROUND = (1.0, math.inf)
ROUNDS = {"pattern": (0.2, 500)}


def memory_peak() -> int:
    """High-water mark of this process' resident memory, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def compiler(name: str, model_mode: str) -> Callable[[Any], Any]:
    """What turns a function into a compiled one. Names: eager, kiln, torch, torch-max-autotune, torch-freezing."""
    if name == "eager":
        return lambda function: function
    if name == "kiln":
        import kiln

        return kiln.compile
    import torch

    if name == "torch":
        return torch.compile
    if name == "torch-max-autotune":
        return lambda function: torch.compile(function, mode="max-autotune")
    if name == "torch-freezing":
        return lambda function: torch.compile(function, options={"freezing": True})
    raise ValueError(f"unknown compiler {name!r}")


def model_cell(cell: dict[str, Any]) -> Callable[[], Any]:
    """A call that does one step (train) or one forward pass (infer) of a model."""
    import torch

    from kiln.bench import models

    work = models.make(cell["model"], cell["size"])
    make = compiler(cell["compiler"], cell["phase"])
    inputs = work.batch(0)
    if cell["phase"] == "train":
        work.module.train()
        optimizer = work.optimizer(work.module.parameters())
        step = make(models.training_step(work, optimizer))
        return lambda: step(*inputs)
    work.module.eval()
    infer = make(work.infer)

    def run() -> Any:
        with torch.no_grad():
            return infer(*inputs)

    return run


def overhead_cell(cell: dict[str, Any]) -> Callable[[], Any]:
    """(x + 1) * 2 on 4 numbers, a thousand calls: the cost of being called."""
    import torch

    def f(x):
        return (x + 1) * 2

    g = compiler(cell["compiler"], "infer")(f)
    x = torch.ones(4, requires_grad=cell["phase"] == "grad")

    def run() -> None:
        for _ in range(1000):
            g(x)

    if cell["phase"] == "grad":
        return run

    def run_no_grad() -> None:
        with torch.no_grad():
            for _ in range(1000):
                g(x)

    return run_no_grad


def layers_cell(cell: dict[str, Any]) -> Callable[[], Any]:
    """Guards and call alone: so many tiny layers under a backend that returns a constant; a hundred calls."""
    import torch

    net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(int(cell["phase"]))])
    constant = torch.zeros(2, 2)

    def backend(gm, example_inputs):
        return lambda *args: (constant,)

    if cell["compiler"] == "eager":
        g = net
    elif cell["compiler"] == "kiln":
        import kiln

        g = kiln.compile(net, backend=backend)
    else:
        g = torch.compile(net, backend=backend)
    x = torch.ones(2, 2)

    def run() -> None:
        with torch.no_grad():
            for _ in range(100):
                g(x)

    return run


# (name, rows, inner, columns) of the products x @ w of GPT-2 and ViT at the measured sizes.
PRODUCTS = [
    ("gpt2 qkv", 512, 256, 768),
    ("gpt2 projection", 512, 256, 256),
    ("gpt2 mlp up", 512, 256, 1024),
    ("gpt2 mlp down", 512, 1024, 256),
    ("gpt2 head", 512, 256, 50257),
    ("vit projection", 788, 256, 256),
    ("vit mlp up", 788, 256, 1024),
    ("vit mlp down", 788, 1024, 256),
]


def product_cell(cell: dict[str, Any]) -> Callable[[], Any]:
    """One matrix product, as the forward pass or one of the two gradients needs it. phase: "name|forward" etc."""
    import torch

    name, kind = cell["phase"].split("|")
    _, m, k, n = next(p for p in PRODUCTS if p[0] == name)
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    functions = {
        "forward": (lambda a, b: torch.nn.functional.linear(a, b), (x, w)),
        "input gradient": (lambda a, b: a @ b, (g, w)),
        "weight gradient": (lambda a, b: a.t() @ b, (g, x)),
    }
    function, args = functions[kind]
    compiled = compiler(cell["compiler"], "infer")(function)

    def run() -> Any:
        with torch.no_grad():
            return compiled(*args)

    return run


def pattern_cell(cell: dict[str, Any]) -> Callable[[], Any]:
    """A small program. phase: its name and "infer" or "train", "softmax over channels|train"."""
    import torch

    from kiln.bench import patterns

    name, kind = cell["phase"].split("|")
    function, inputs = patterns.call(patterns.find(name), kind == "train")
    compiled = compiler(cell["compiler"], kind)(function)

    def run() -> Any:
        with torch.set_grad_enabled(kind == "train"):
            return compiled(*inputs)

    return run


CELLS = {"overhead": overhead_cell, "layers": layers_cell, "product": product_cell, "pattern": pattern_cell}
CALLS_PER_RUN = {"overhead": 1000, "layers": 100}


def reply(**values: Any) -> None:
    sys.__stdout__.write(json.dumps(values) + "\n")
    sys.__stdout__.flush()


def main() -> None:
    cell = json.loads(sys.argv[1])
    sys.stdout = sys.stderr  # the pipe carries replies only
    import torch

    if cell.get("threads"):
        torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    before = memory_peak()
    run = CELLS.get(cell["model"], model_cell)(cell)
    calls = CALLS_PER_RUN.get(cell["model"], 1)
    seconds, most_steps = ROUNDS.get(cell["model"], ROUND)
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    for _ in range(3):
        run()
    reply(first=first, threads=torch.get_num_threads())
    peak_flops = None
    for line in sys.stdin:
        if line.strip() != "round":
            break
        times: list[float] = []
        if cell["model"] == "product":
            from kiln import _C

            peak_flops = _C.fma_peak(torch.get_num_threads(), 0.2)
        end = time.perf_counter() + seconds
        while len(times) < MIN_STEPS or (len(times) < most_steps and time.perf_counter() < end):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) / calls)
        reply(times=times, peak_gflops=peak_flops)
    reply(memory=memory_peak() - before)
    os._exit(0)  # compilers' worker pools would keep the process


if __name__ == "__main__":
    main()
