"""What a backend is given: a function of two arguments, and a module with a ReLU.

Expected output: for `fn` a graph module whose code is

    cos = torch.cos(l_x_);  sin = torch.sin(l_y_);  add = cos + sin;  return (add,)

with comments that name this file's lines, its table of nodes, and "fn: equal"; for the module a graph with the parameters among
the placeholders, linear and relu, and "module: equal".
"""

import torch
from torch import nn

import kiln


def print_backend(gm: torch.fx.GraphModule, example_inputs):
    print(f"a graph with {len(example_inputs)} inputs: {[tuple(x.shape) for x in example_inputs]}")
    gm.print_readable()
    gm.graph.print_tabular()
    return gm.forward


def fn(x, y):
    a = torch.cos(x)
    b = torch.sin(y)
    return a + b


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 10)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.lin(x))


def main():
    torch.manual_seed(0)
    x, y = torch.randn(10), torch.randn(10)
    result = kiln.compile(fn, backend=print_backend)(x, y)
    print("fn:", "equal" if torch.allclose(result, fn(x, y)) else "different")
    layer = Layer()
    x = torch.randn(2, 10)
    result = kiln.compile(layer, backend=print_backend)(x)
    print("module:", "equal" if torch.allclose(result, layer(x)) else "different")


if __name__ == "__main__":
    main()
