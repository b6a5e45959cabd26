"""Branches on tensors of which one side raises: they stay in the graph, and a call for which one fails runs in eager.

PYTEST_DONT_REWRITE: the program's own assert statements are what is tested."""

import pytest
import torch
import torch.distributions as D
from torch import nn

import kiln
from helpers import check, outcome
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 6).reshape(2, 3)
POSITIVE = torch.linspace(0.5, 2, 6).reshape(2, 3)


def breaks(f, *args):
    kiln.reset()
    return kiln.explain(f)(*args).graph_break_count


def assertion(x):
    assert torch.isfinite(x).all(), "infinite"
    return x * 2


def negated(x):
    y = x * 2
    if not (y < 10).all():
        raise ValueError(f"too large: {y.max().item()} of {tuple(y.shape)}")
    return y + 1


def nested(x):
    def root(v):
        if (v < 0).any():
            raise ValueError("a negative number")
        return v.sqrt()

    return root(x) + root(x + 1)


@pytest.mark.parametrize("f", [assertion, negated, nested])
def test_they_are_part_of_one_graph(f):
    assert breaks(f, POSITIVE) == 0
    check(f, POSITIVE)


@pytest.mark.parametrize("bad", [torch.tensor([1.0, float("inf")]), torch.tensor([-30.0, 50.0])])
@pytest.mark.parametrize("f", [assertion, negated, nested])
def test_a_failing_one_raises_as_in_eager(f, bad):
    compiled = kiln.compile(f)
    for x in (torch.ones(2), bad, torch.ones(2), bad):
        assert_same(*[outcome(g, (x,), {}) for g in (f, compiled)])


def test_the_first_call_may_fail():
    check(assertion, torch.tensor([float("nan")]))


def test_nothing_has_happened_when_one_fails():
    """Lists, attributes, the generator and gradients are as eager leaves them: changed up to the assertion."""

    def run(compiled):
        torch.manual_seed(0)
        seen, net = [], nn.Linear(3, 3)

        def f(x):
            seen.append("before")
            noise = torch.rand(2, 3)
            y = net(x) + noise
            assert (y < 50).all(), "large"
            seen.append("behind")
            return y + torch.rand(2, 3)

        function = kiln.compile(f) if compiled else f
        results = []
        for scale in (1, 1000, 2):
            try:
                results.append(function(X * scale))
            except AssertionError as e:
                results.append(str(e))
            results.append(torch.rand(2))
        return results, seen

    assert_same(run(False), run(True))


def test_a_caught_one():
    def f(x):
        try:
            assert (x > 0).all()
            return x.log()
        except AssertionError:
            return x.abs()

    assert breaks(f, POSITIVE) == 0
    check(f, POSITIVE)
    check(f, X)


def test_a_graph_that_writes_to_what_exists_breaks_at_them():
    """It could not be undone."""

    def before(x, state):
        state.add_(1)
        assert (x > 0).all()
        return x * state

    def behind(x, state):
        assert (x > 0).all()
        state.add_(1)
        return x * state

    def view(x, state):
        part = state[0]
        assert (x > 0).all()
        part.mul_(2)
        return x * state

    for f in (before, behind, view):
        assert breaks(f, POSITIVE, torch.ones(2, 1)) > 0
        for x in (POSITIVE, X):
            expected, actual = torch.ones(2, 1), torch.ones(2, 1)
            assert_same(outcome(f, (x, expected), {}), outcome(kiln.compile(f), (x, actual), {}))


@pytest.mark.parametrize("step", ["backward", "optimizer"])
def test_a_training_step_with_one(step):
    """Gradients and parameters of a step that fails stay as they are."""

    def run(compiled):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def f(x):
            loss = net(x).pow(2).sum()
            assert torch.isfinite(loss)
            loss.backward()
            if step == "optimizer":
                opt.step()
            return loss.detach()

        function = kiln.compile(f) if compiled else f
        results = []
        for x in (X, X + 1, X / 0, X):
            try:
                results.append(function(x))
            except AssertionError:
                results.append("failed")
            results.append([p.grad.clone() for p in net.parameters()])
        return results, list(net.parameters())

    assert_same(run(False), run(True))


def test_batch_norm_in_training_writes_its_statistics():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))

    def f(x):
        y = net(x)
        assert torch.isfinite(y).all()
        return y

    assert breaks(f, X) > 0
    net.eval()
    assert breaks(f, X) == 0


def test_a_condition_that_is_overwritten():
    def f(x):
        good = (x > 0).all()
        assert good
        good.fill_(False)
        return x * 2, good

    check(f, POSITIVE)
    check(f, X)


def test_writes_to_what_the_call_made_are_no_obstacle():
    def f(x):
        y = x.clone()
        y.add_(1)
        assert (y > 0).all()
        y[0] = 0
        return y

    assert breaks(f, POSITIVE) == 0
    check(f, POSITIVE)
    check(f, X)


def test_gradients_behind_one():
    def f(x):
        y = x.exp()
        assert (y > 0).all()
        return y.sum()

    check(f, X.clone().requires_grad_())


def test_another_branch_still_breaks():
    def f(x):
        if x.sum() > 0:
            return x * 2
        return x - 1

    assert breaks(f, X) == 1
    check(f, X)
    check(f, POSITIVE)


def test_off_switch():
    with kiln.config.patch(disable_passes="capture.assertions"):
        assert breaks(assertion, POSITIVE) == 1


def normal(mean):
    d = D.Normal(mean, mean.exp())
    return d.log_prob(d.rsample()).sum() + d.entropy().sum()


def categorical(logits):
    d = D.Categorical(logits=logits)
    return d.log_prob(d.sample()) + d.entropy()


def divergence(mean):
    return D.kl_divergence(D.Normal(mean, mean.exp()), D.Normal(0.0, 1.0)).sum()


def squashed(mean):
    d = D.TransformedDistribution(D.Normal(mean, mean.exp()), [D.TanhTransform(cache_size=1)])
    action = d.rsample()
    return action, d.log_prob(action)


def dirichlet(x):
    d = D.Dirichlet(x.exp())
    return d.log_prob(d.rsample())


@pytest.mark.parametrize(
    "f",
    [
        normal,
        categorical,
        divergence,
        squashed,
        dirichlet,
        lambda x: D.Bernoulli(logits=x).log_prob(D.Bernoulli(logits=x).sample()),
        lambda x: D.Beta(x.exp(), 1 + x.exp()).rsample(),
        lambda x: D.Gamma(x.exp(), 1.0).rsample(),
        lambda x: D.Binomial(5, logits=x).sample(),
        lambda x: D.Independent(D.Laplace(x, x.exp()), 1).log_prob(x),
        lambda x: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, x.exp())).log_prob(x[:, 0]),
    ],
)
def test_distributions_check_their_arguments_in_the_graph(f):
    assert breaks(f, X) == 0
    check(f, X)
    check(f, X.clone().requires_grad_())


def test_a_distribution_with_a_wrong_argument():
    def f(scale):
        return D.Normal(torch.zeros(2), scale).sample()

    compiled = kiln.compile(f)
    for scale in (torch.ones(2), torch.tensor([1.0, -1.0]), torch.ones(2)):
        assert_same(*[outcome(g, (scale,), {}) for g in (f, compiled)])
