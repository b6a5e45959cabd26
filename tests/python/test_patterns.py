"""The small programs of the benchmark `python -m kiln bench --suite patterns` compute what eager does."""

import json

import pytest
import torch

from helpers import check
from kiln.bench import patterns, runner, worker


@pytest.mark.parametrize("pattern", patterns.PATTERNS, ids=lambda p: p.name)
def test_values_and_gradients(pattern):
    torch.manual_seed(0)
    half = pattern.name == "half precision"
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-3, "atol": 1e-3}
    check(pattern.function, *pattern.inputs(), grad=pattern.gradient, **tolerance)


def test_a_cell_of_the_suite(monkeypatch):
    cell = {"model": "pattern", "phase": "softmax over channels|train", "compiler": "kiln"}
    (gradient,) = worker.pattern_cell(cell)()
    torch.manual_seed(0)
    assert gradient.shape == (16, 64, 256)
    names = {f.phase for f in runner.pattern_figures()}
    assert cell["phase"] in names and "integers|infer" in names and "integers|train" not in names
    json.dumps(sorted(names))  # cells travel as JSON
