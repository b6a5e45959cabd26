"""Compiled autograd: a backward through an eager model, hooks included, as one graph.

The model is not compiled, and its parameters are updated by hooks in the middle of the backward, each as soon as its gradient is
there. Within `kiln.compiled_autograd.enable` that backward is one graph: the formulas of the nodes, the hook on an activation and
the updates of the parameters. It is traced at the first step and found again at the others.

Expected output (the losses are those of eager):

    the first backward: 31 operators and hooks in one graph
    graphs traced in 5 steps: 1
    losses agree: True
"""

import copy

import torch

import kiln


def in_backward(model):
    """Makes each parameter's update a hook that runs when its gradient has been accumulated."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model


def train(model, steps, x, y):
    losses = []
    for _ in range(steps):
        hidden = model[0](x)
        hidden.register_hook(lambda grad: grad.clamp(-1, 1))
        loss = torch.nn.functional.mse_loss(model[1:](hidden), y)
        loss.backward()
        losses.append(loss.item())
    return losses


def main(steps=5):
    torch.manual_seed(0)
    x, y = torch.randn(32, 16), torch.randn(32, 4)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)
    )
    eager = train(in_backward(copy.deepcopy(model)), steps, x, y)

    graphs = []

    def compiler(gm):
        graphs.append(gm)
        return kiln.compile(gm)

    with kiln.compiled_autograd.enable(compiler):
        compiled = train(in_backward(model), steps, x, y)

    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    print(f"the first backward: {len(calls)} operators and hooks in one graph")
    print(f"graphs traced in {steps} steps: {len(graphs)}")
    agree = all(abs(a - b) < 1e-5 for a, b in zip(eager, compiled, strict=True))
    print(f"losses agree: {agree}")
    return graphs, agree


if __name__ == "__main__":
    main()
