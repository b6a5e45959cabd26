"""functools.lru_cache: functions whose results are objects, as einops keeps its recipes."""

import functools

import pytest
import torch
from torch import nn

import kiln
from helpers import breaks, check, check_calls, check_sizes

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


# --- sizes that are left open ---


@functools.lru_cache(None)
def split(shape, axis, *, parts):
    width = shape[axis]
    if width % parts:
        raise ValueError(f"{width} in {parts} parts")
    return [shape[0], parts, width // parts], {"width": width}


@functools.lru_cache
def positions(n):
    return torch.arange(n).float()


def test_open_sizes_in_a_call():
    def f(x):
        shape, more = split(x.shape, 1, parts=2)
        again, _ = split(x.shape, 1, parts=2)
        assert again is shape
        return x.reshape(shape) * more["width"]

    check_sizes(f, make=lambda n: (torch.randn(3, 2 * n),))
    assert kiln.explain(f, dynamic=True)(torch.randn(3, 8)).graph_break_count == 0


def test_open_sizes_and_a_recipe():
    def f(x):
        return rearrange(rearrange(x, "a b c -> c a b"), "a b c -> b c a")

    check_sizes(f, make=lambda n: (torch.randn(2, n, 3),))


def test_a_cached_call_that_raises_for_some_sizes():
    def f(x):
        try:
            return x.reshape(split(x.shape, 1, parts=3)[0])
        except ValueError as error:
            return x + len(str(error))

    check_calls(f, [(torch.randn(2, n),) for n in (6, 9, 10, 11, 12, 100)])


def test_tensors_of_a_cache_are_made_once():
    def f(x):
        return x + positions(x.shape[0])

    check_sizes(f, make=lambda n: (torch.randn(n),), entries=None)
    compiled = kiln.compile(lambda x: (x + 1, positions(x.shape[0])), dynamic=True)
    for n in (5, 6):
        assert compiled(torch.randn(n))[1] is positions(n)


def test_effects_of_a_cached_call_happen_once_for_each_size():
    seen = []

    @functools.lru_cache
    def scale(n):
        seen.append(n)
        return n + 1

    compiled = kiln.compile(lambda x: x * scale(x.shape[0]), dynamic=True)
    for n in (4, 5, 4, 6, 5):
        x = torch.randn(n)
        assert torch.equal(compiled(x), x * (n + 1))
    assert seen == [4, 5, 6]


def test_what_a_cache_kept_is_not_computed_anew():
    factor = [2]

    @functools.lru_cache
    def scale(n):
        return n * factor[0]

    x = torch.randn(4)
    assert scale(4) == 8
    factor[0] = 3
    compiled = kiln.compile(lambda x: x * scale(x.shape[0]), dynamic=True)
    assert torch.equal(compiled(x), x * 8)


@pytest.mark.parametrize("use", ["changes", "returns", "stores"])
def test_lists_of_a_cache_with_open_sizes(use):
    @functools.lru_cache
    def sizes(n):
        return [n, n + 1]

    kept = {}

    def f(x):
        found = sizes(x.shape[0])
        if use == "changes":
            found.append(1)
        if use == "stores":
            kept["sizes"] = found
        return x * len(found), found if use == "returns" else None

    compiled = kiln.compile(f, dynamic=True)
    for n in (3, 4, 3, 5):
        x = torch.randn(n)
        result, found = compiled(x)
        assert torch.equal(result, x * len(sizes(n)))
        if use == "returns":
            assert found is sizes(n)
        if use == "stores":
            assert kept["sizes"] is sizes(n)
    assert sizes(3) == ([3, 4, 1, 1] if use == "changes" else [3, 4])


SALT = [0]


class Signature:
    """What is asked for by the shapes of tensors, as a tracer of einx."""

    def __init__(self, shape, more=None):
        self.shape = tuple(int(s) for s in shape)
        self.more = more

    def __eq__(self, other):
        return isinstance(other, Signature) and (self.shape, self.more) == (other.shape, other.more)

    def __hash__(self):
        return hash((self.shape, SALT[0]))


class FrozenDict(dict):
    def __hash__(self):
        return hash(frozenset(self.items()))


@functools.cache
def construct(signatures, options):
    names = ", ".join(f"x{i}" for i in range(len(signatures)))
    code = f"def op({names}): return ({names.replace(',', ' *')}).sum({options['axis']})"
    scope = {}
    exec(code, scope)
    return scope["op"], code


def signed(*tensors, axis=-1):
    op, code = construct(tuple(Signature(t.shape) for t in tensors), FrozenDict(axis=axis, of=Signature((axis + 9,))))
    return op(*tensors)


def test_keys_that_the_captured_code_made():
    def f(x, y):
        return signed(x, y) + signed(x, y, x, axis=0).sum()

    check(f, X, X + 1, calls=3)
    assert breaks(f, X, X + 1) == 0
    compiled = kiln.compile(f, fullgraph=True, dynamic=False)
    for n in (2, 3, 2):
        x = torch.randn(n, 4)
        assert torch.allclose(compiled(x, x), f(x, x))


def test_what_the_hash_of_a_key_reads_is_guarded():
    built = []

    @functools.lru_cache(None)
    def build(signature):
        built.append(signature)
        return Recipe([len(built)], [])

    compiled = kiln.compile(lambda x: x * build(Signature(x.shape)).order[0])
    x = torch.randn(3)
    assert torch.equal(compiled(x), x)
    assert torch.equal(compiled(x), x)
    SALT[0] += 1
    try:
        assert torch.equal(compiled(x), x * 2)  # another key, as in eager
    finally:
        SALT[0] -= 1
    assert len(built) == 2


def test_keys_that_hold_tensors_are_left_to_the_program():
    @functools.lru_cache(None)
    def build(signature):
        return Recipe([3], [])

    def f(x):
        y = x + 1
        return y * build(Signature(x.shape, more=Recipe([y], []))).order[0]

    x = torch.randn(3)
    compiled = kiln.compile(f)
    for _ in range(3):
        assert torch.equal(compiled(x), f(x))
    assert breaks(f, x) > 0


def test_keys_that_equal_no_other_are_new_in_each_call():
    built = []

    @functools.lru_cache(None)
    def build(recipe):
        built.append(recipe)
        return [len(built)]

    compiled = kiln.compile(lambda x: x * build(Recipe([3], []))[0])
    x = torch.randn(3)
    for n in range(1, 4):
        assert torch.equal(compiled(x), x * n)
    assert len(built) == 3
