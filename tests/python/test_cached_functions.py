"""functools.lru_cache: functions whose results are objects, as einops keeps its recipes."""

import functools

import pytest
import torch
from torch import nn

import kiln
from helpers import breaks, check

X = torch.arange(24.0).reshape(2, 3, 4)


class Recipe:
    def __init__(self, order, sizes):
        self.order = order
        self.sizes = sizes
        self.added = {}


@functools.lru_cache(256)
def recipe_of(pattern, rank):
    left, right = (side.split() for side in pattern.split("->"))
    return Recipe([left.index(name) for name in right], [-1] * rank)


@functools.lru_cache(None)
def sizes_for(recipe, shape, scale=1):
    return [shape[i] for i in recipe.order], {"scale": scale}


@functools.lru_cache
def layers(width, count=2):
    torch.manual_seed(0)
    return tuple(nn.Linear(width, width) for _ in range(count))


def rearrange(x, pattern):
    recipe = recipe_of(pattern, x.dim())
    sizes, options = sizes_for(recipe, tuple(x.shape), scale=2)
    return x.permute(recipe.order).reshape(sizes) * options["scale"]


def test_recipes_stay_in_the_graph():
    def f(x):
        return rearrange(rearrange(x, "a b c -> c a b"), "a b c -> b c a") + rearrange(x, "a b c -> a b c")

    check(f, X, calls=3)
    assert breaks(f, X) == 0


def test_modules_from_a_cache():
    def f(x):
        for layer in layers(4):
            x = layer(x).relu()
        return x

    layers(4)  # the generator's numbers are drawn once
    check(f, X)
    assert breaks(f, X) == 0


@pytest.mark.parametrize("function", [recipe_of, layers])
def test_one_object_for_all_calls(function):
    def f(x):
        args = ("a b c -> c b a", 3) if function is recipe_of else (4,)
        return x + 1, function(*args), function(*args)

    compiled = kiln.compile(f)
    _, a, b = compiled(X)
    assert a is b and compiled(X)[1] is a and f(X)[1] is a


def test_what_was_done_to_the_result_since():
    compiled = kiln.compile(lambda x: rearrange(x, "a b c -> b a c"))
    assert torch.equal(compiled(X), X.transpose(0, 1) * 2)
    recipe = recipe_of("a b c -> b a c", 3)
    recipe.order.reverse()
    sizes_for.cache_clear()
    assert torch.equal(compiled(X), X.permute(2, 0, 1) * 2)
    recipe.order = [0, 1, 2]
    sizes_for.cache_clear()
    assert torch.equal(compiled(X), X * 2)
    recipe_of.cache_clear()


def test_a_cache_that_was_cleared_gives_another_object():
    made = []

    @functools.lru_cache(2)
    def scale(name):
        made.append(name)
        return [float(len(made))]

    compiled = kiln.compile(lambda x: x * scale("a")[0])
    assert torch.equal(compiled(X), X)
    assert torch.equal(compiled(X), X)
    scale.cache_clear()
    assert torch.equal(compiled(X), X * 2)
    assert torch.equal(compiled(X), X * 2)
    scale("b"), scale("c")  # "a" has to go
    assert torch.equal(compiled(X), X * 5)
    assert made == ["a", "a", "b", "c", "a"]


def test_the_program_changes_a_result():
    @functools.lru_cache(None)
    def history(name):
        return []

    def f(x):
        seen = history("calls")
        seen.append(len(seen))
        return x + len(seen)

    compiled = kiln.compile(f)
    for n in range(1, 5):
        assert torch.equal(compiled(X), X + n)
    assert history("calls") == [0, 1, 2, 3]


def test_arguments_with_comparisons_of_their_own_break():
    class Key:
        def __init__(self, value):
            self.value = value

        def __hash__(self):
            return hash(self.value)

        def __eq__(self, other):
            return self.value == other.value

    @functools.lru_cache(None)
    def numbers(key):
        return [key.value]

    def f(x, key):
        return x * numbers(key)[0]

    compiled = kiln.compile(f)
    for value in (2, 3, 2):
        assert torch.equal(compiled(X, Key(value)), X * value)
