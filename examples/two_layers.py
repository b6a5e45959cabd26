"""A two-layer network: its captured graph, and the ATen graphs of its forward and backward pass.

First under a backend that prints the captured graph and draws it; then through kiln.aot, with compilers that draw the graphs they
are given. Then it is trained for several steps with either.

Expected output (the folder is examples/out unless another is given):

    the graph as a table: two placeholders for each layer (weight, bias), linear, relu, linear, output
    ... forward.svg
    ... aot_forward.svg
    ... aot_backward.svg
    step 0: loss ...          (five lines, the loss falls, the same numbers for eager, the printing backend and aot)
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.fx.passes.graph_drawer import FxGraphDrawer
from torch.nn import functional as F

import kiln
from kiln.aot import aot_module_simplified, make_boxed_func


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def draw(gm, path):
    FxGraphDrawer(gm, path.stem).get_dot_graph().write_svg(str(path))
    print(path)


def printing_backend(folder):
    def backend(gm: torch.fx.GraphModule, example_inputs):
        gm.print_readable()
        gm.graph.print_tabular()
        draw(gm, folder / "forward.svg")
        return gm.forward

    return backend


def aot_backend(folder):
    def compiler(name):
        def compile_graph(gm: torch.fx.GraphModule, example_inputs):
            draw(gm, folder / f"aot_{name}.svg")
            return make_boxed_func(gm.forward)

        return compile_graph

    def backend(gm: torch.fx.GraphModule, example_inputs):
        return aot_module_simplified(
            gm, example_inputs, fw_compiler=compiler("forward"), bw_compiler=compiler("backward")
        )

    return backend


def train(backend, steps=5):
    torch.manual_seed(0)
    net = TwoLayers()
    run = net if backend is None else kiln.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.6f}")
    return losses


def main(folder=Path(__file__).parent / "out"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return train(None), train(printing_backend(folder)), train(aot_backend(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
