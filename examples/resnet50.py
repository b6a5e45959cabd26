"""ResNet-50 with Adam, several steps: median step time in eager and in kiln.

Usage: resnet50.py [steps] [image size]. Expected output: one line a step with both losses, which agree to float tolerance, then

    eager  ... ms a step (first ... ms)
    kiln   ... ms a step (first ... ms), ...x
"""

import statistics
import sys
import time

import torch
from torch.nn import functional as F

import kiln
from kiln.bench.convnets import resnet50


def trainer(compiled):
    torch.manual_seed(0)
    model = resnet50(classes=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return kiln.compile(step) if compiled else step


def main(steps=8, size=128):
    eager, ours = trainer(False), trainer(True)
    times = {"eager": [], "kiln": []}
    losses = []
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, size, size, generator=generator), torch.arange(8)
    for number in range(steps):
        pair = []
        for name, step in (("eager", eager), ("kiln", ours)):
            start = time.perf_counter()
            pair.append(step(x, y).item())
            times[name].append(time.perf_counter() - start)
        losses.append(pair)
        print(f"step {number}: loss {pair[0]:.5f} eager, {pair[1]:.5f} kiln")
    medians = {name: statistics.median(t[1:] or t) * 1e3 for name, t in times.items()}
    print(f"eager  {medians['eager']:.1f} ms a step (first {times['eager'][0] * 1e3:.0f} ms)")
    ratio = medians["eager"] / medians["kiln"]
    print(f"kiln   {medians['kiln']:.1f} ms a step (first {times['kiln'][0] * 1e3:.0f} ms), {ratio:.2f}x")
    return losses, medians


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
