"""The models by themselves: a step in eager lowers the loss' next value and is repeatable from its seed."""

import pytest
import torch

from kiln.bench import models


@pytest.mark.parametrize("name", models.names())
def test_training_is_repeatable(name):
    def run():
        work = models.make(name, "small", seed=3)
        work.module.train()
        step = models.training_step(work, work.optimizer(work.module.parameters()))
        inputs = work.batch(5)
        torch.manual_seed(1)
        return [float(step(*inputs)) for _ in range(4)]

    losses = run()
    assert losses == run()
    assert losses[-1] != losses[0]
