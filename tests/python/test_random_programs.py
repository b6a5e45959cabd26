"""Programs made at random, of fixed seeds: see random_programs."""

import warnings

import pytest

import kiln
from random_programs import KINDS

EACH = 25  # programs of one test
BATCHES = [(kind, first) for kind in KINDS for first in range(0, 100 if kind == "training" else 300, EACH)]


@pytest.mark.parametrize(("kind", "first"), BATCHES)
def test_compiled_is_as_eager(kind, first):
    for seed in range(first, first + EACH):
        kiln.reset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of eager's own, and that something runs in eager
                KINDS[kind].run(seed)
        except Exception as e:
            raise AssertionError(f"{kind} {seed}: {e}\n{KINDS[kind].program(seed)}") from e


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_names_one_program(kind):
    programs = [KINDS[kind].program(seed) for seed in range(20)]
    assert programs == [KINDS[kind].program(seed) for seed in range(20)]
    assert len(set(programs)) == 20
