"""Dicts whose keys are tensors, as the states of optimizers are: what is kept for one of them is found by the tensor,
wherever else it is. And dicts that are written where nobody looks at them as a whole."""

import collections
import warnings

import pytest
import torch
from torch import nn

import kiln
from helpers import check_calls
from test_container_lookups import entries as graphs


def parameters(n=12):
    return [nn.Parameter(torch.full((3,), float(i))) for i in range(n)]


def test_the_item_of_a_tensor_is_found_by_it():
    ps = parameters()
    state = {p: {"moment": torch.full((3,), i * 0.5)} for i, p in enumerate(ps)}
    assert graphs(lambda p, state: p * 2 + state[p]["moment"], [(p, state) for p in ps]) == 1


def test_a_list_that_holds_the_tensor_is_not_looked_at():
    ps = parameters()
    group = {"params": ps, "lr": 0.5}
    assert graphs(lambda p, group: p * group["lr"], [(p, group) for p in ps]) == 1


def test_a_list_that_is_looked_at_is():
    ps = parameters(3)
    group = {"params": ps, "lr": 0.5}

    def f(p, group):
        return p * group["lr"] + sum(i for i, q in enumerate(group["params"]) if q is p)

    check_calls(f, [(p, group) for p in ps])
    check_calls(lambda p, group: (p * 2, group["params"][1] * 3, group["params"][1] is p), [(p, group) for p in ps])
    check_calls(lambda p, group: (p * 2, group["params"]), [(p, group) for p in ps])


def test_presence():
    ps = parameters(4)
    state = {p: i for i, p in enumerate(ps[:2])}
    check_calls(lambda p, state: p + state[p] if p in state else p - 1, [(p, state) for p in ps])
    check_calls(lambda p, state: p + state.get(p, 7), [(p, state) for p in ps])
    with pytest.raises(KeyError):
        kiln.compile(lambda p, state: p + state[p])(ps[3], state)


def test_a_key_whose_class_hashes_by_value():
    class Named(torch.Tensor):
        def __hash__(self):
            return 7

        def __eq__(self, other):
            return True

    a, b = torch.ones(2).as_subclass(Named), torch.zeros(2).as_subclass(Named)
    compiled = kiln.compile(lambda t, d: t.as_subclass(torch.Tensor) * d[t])
    for t, d, expected in [(a, {a: 2.0}, 2.0), (b, {a: 3.0}, 0.0), (a, {b: 4.0, 1: 5.0}, 4.0)]:
        assert compiled(t, d).tolist() == [expected] * 2


def same_state(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert [k if not torch.is_tensor(k) else "tensor" for k in a] == [
            k if not torch.is_tensor(k) else "tensor" for k in b
        ]
        for x, y in zip(a.values(), b.values(), strict=True):
            same_state(x, y)
    else:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [dict, lambda: collections.defaultdict(dict)])
def test_items_are_made_for_tensors(kind):
    """One compile serves all parameters, in the step that makes their states, too."""

    def step(p, state):
        own = state[p] if p in state else state.setdefault(p, {})
        if len(own) == 0:
            own["step"] = 0
            own["moment"] = torch.zeros_like(p)
        own["step"] += 1
        own["moment"].mul_(0.5).add_(p)
        return own["moment"] * own["step"]

    compiled = kiln.compile(step)
    ours, theirs, p = kind(), kind(), parameters()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # the recompile limit
        for _ in range(3):
            for x in p:
                torch.testing.assert_close(compiled(x, ours), step(x, theirs))
    same_state(ours, theirs)


def test_written_and_looked_at_in_one_call():
    def f(x, d):
        d["a"] = x * 2
        d["n"] = d.get("n", 0) + 1
        had = "b" in d
        d["b"] = d["a"] + 1
        keys = list(d)
        del d["a"]
        d["a"] = 5
        return d["b"], had, keys, len(d)

    calls = [{}, {"a": 1, "b": 2}, {"b": torch.ones(2), "z": 0}, {"n": 3, "b": 1, "a": 2}]
    check_calls(f, [(torch.ones(2), d) for d in calls])


def test_two_dicts_that_may_be_one():
    def f(x, d, e):
        d["a"] = x * 2
        before = e.get("a")
        e["a"] = 3
        return before, d["a"]

    one = {"a": 1}
    check_calls(f, [(torch.ones(2), {"a": 1}, {"a": 2}), (torch.ones(2), one, one), (torch.ones(2), {}, {"a": 2})])


def test_a_default_is_made():
    def f(x, d):
        d["seen"].append(x.sum())
        return len(d["seen"])

    check_calls(f, [(torch.ones(2), collections.defaultdict(list, {k: [1]})) for k in ("a", "b", "seen")])


class Trusting(torch.optim.Optimizer):
    """Breaks at each parameter, between what it reads and what it writes."""

    def __init__(self, params, breaks, lr=0.1):
        super().__init__(params, {"lr": lr, "beta": 0.9, "decay": 0.01})
        self.breaks = breaks

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["moment"] = torch.zeros_like(p)
                state["step"] += 1
                moment = state["moment"]
                moment.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                update = moment + group["decay"] * p
                norm = p.norm()
                if self.breaks:
                    kiln.graph_break()
                state["norm"] = norm
                p.add_(update * (norm + 1), alpha=-group["lr"] / state["step"] ** 0.5)


@pytest.mark.parametrize("shapes", ["alike", "all different"])
def test_a_loop_over_parameters_that_breaks(shapes):
    def train(compiles):
        torch.manual_seed(0)
        sizes = [8] * 13 if shapes == "alike" else [8 + 2 * i for i in range(13)]
        net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        optimizer = Trusting(net.parameters(), compiles)
        step = kiln.compile(optimizer.step) if compiles else optimizer.step
        for i in range(4):
            net(torch.randn(4, 8, generator=torch.Generator().manual_seed(i))).pow(2).mean().backward()
            step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()], list(optimizer.state.values())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the recompile limit
        ours = train(True)
    theirs = train(False)
    torch.testing.assert_close(ours[0], theirs[0])
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert list(a) == list(b)
        torch.testing.assert_close(a, b)
