"""A torch.autograd.Function whose backward runs the forward again and differentiates it."""

import pytest
import torch

import kiln


class RunAgain(torch.autograd.Function):
    """A checkpoint as diffusion models have it: the backward runs the function again and differentiates that."""

    @staticmethod
    def forward(ctx, run, length, *args):
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.run(*[x.view_as(x) for x in inputs])
        found = torch.autograd.grad(outputs, inputs + ctx.parameters, grads, allow_unused=True)
        return (None, None, *found)


class Again(torch.nn.Module):
    def __init__(self, size=16, hidden=16):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(size), torch.nn.Linear(size, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, size)
        )
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return RunAgain.apply(lambda x: x + self.layers(x), 1, x, *self.parameters())


@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_that_runs_the_forward_again(whole):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), *[Again() for _ in range(3)])
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def train(compiled):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD([p for p in model.parameters()], 0.1)
        run = kiln.compile(model, fullgraph=True) if compiled and not whole else model

        def step(x):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if compiled and whole:
            step = kiln.compile(step, fullgraph=True)
        torch.manual_seed(1)
        losses = [step(torch.randn(8, 16)).detach() for _ in range(3)]
        return losses, [p.detach().clone() for p in model.parameters()]

    for a, b in zip(train(True)[1], train(False)[1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_such_a_backward_keeps(capfd):
    """The forward's activations are computed again: what a call holds until its backward is the layers' inputs."""
    model = torch.nn.Sequential(*[Again(hidden=48) for _ in range(3)])
    kiln.reset()
    kiln.set_logs("aot")
    x = torch.randn(8, 16, requires_grad=True)
    kiln.compile(model, fullgraph=True)(x).sum().backward()
    kiln.set_logs("")
    text = capfd.readouterr().err
    backward = text[text.index("graph backward {") :]
    assert ": f32[8, 48]" in backward
    assert not any(": f32[8, 48]" in line for line in backward.splitlines() if "  input " in line)
    found = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-5)
