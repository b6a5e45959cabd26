"""Data-dependent control flow: what tracing loses, kiln keeps.

torch.jit.trace records the branch that its example took, and gives a wrong answer for the other one without a word; torch.fx
refuses to trace the branch at all. kiln runs the branch in Python and compiles what is around it.

Expected output:

    torch.jit.trace: right for the traced branch, wrong for the other
    torch.fx: TraceError: symbolically traced variables cannot be used as inputs to control flow
    kiln: right for both
"""

import warnings

import torch

import kiln


def f(x):
    y = torch.sin(x)
    if y.sum() > 0:
        return y * 2
    return torch.cos(y) - 1


def main():
    positive, negative = torch.full((4,), 0.5), torch.full((4,), -0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(f, (positive,))

    def verdict(function):
        return ["right" if torch.allclose(function(x), f(x)) else "wrong" for x in (positive, negative)]

    first, other = verdict(traced)
    print(f"torch.jit.trace: {first} for the traced branch, {other} for the other")
    try:
        torch.fx.symbolic_trace(f)
        print("torch.fx: traced")
    except torch.fx.proxy.TraceError as error:
        print(f"torch.fx: {type(error).__name__}: {error}")
    both = set(verdict(kiln.compile(f)))
    print("kiln: right for both" if both == {"right"} else f"kiln: {both}")
    return (first, other), both


if __name__ == "__main__":
    main()
