"""Branches on tensors of which one side raises: they stay in the graph, and a call for which one fails runs in eager.

PYTEST_DONT_REWRITE: the program's own assert statements are what is tested."""

import copy

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

import kiln
from helpers import breaks, check, logged_loops, outcome
from kiln import _C
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 6).reshape(2, 3)
POSITIVE = torch.linspace(0.5, 2, 6).reshape(2, 3)


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


def test_a_graph_that_writes_to_what_exists_asks_first():
    """It writes when they have passed; of a call that fails, eager does what comes before."""

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

    def result(x, state):
        state.mul_(x.sum())
        assert (state > 0).all()
        return x * state

    def twice(x, state):
        state.add_(x[:, :1])
        y = x * state
        assert (y > 0).all()
        state.mul_(2)
        assert torch.isfinite(state).all()
        return y

    for f in (before, behind, view, result, twice):
        assert breaks(f, POSITIVE, torch.ones(2, 1)) == 0
        compiled = kiln.compile(f)
        for x in (POSITIVE, X, -X, POSITIVE):
            expected, actual = torch.ones(2, 1), torch.ones(2, 1)
            assert_same(outcome(f, (x, expected), {}), outcome(compiled, (x, actual), {}))
            assert_same(expected, actual)


def test_it_asks_as_soon_as_it_can(capfd):
    """What is written can be computed in place then: an optimizer's step takes no copies of its parameters."""

    def loops(asks):
        net = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            if asks and not torch.isfinite(loss):
                raise ValueError("infinite")
            optimizer.step()

        kiln.compile(step)(torch.randn(4, 8))
        return logged_loops(capfd, step, torch.randn(4, 8))[1]

    plain, asking = loops(asks=False), loops(asks=True)
    assert asking.index("kiln::ask") < asking.index("aten::mm")
    assert asking.count("nest") == plain.count("nest")


def test_without_compiled_kernels():
    """Calls of ATen's kernels, one by one, write to the inputs at the end too."""
    _C.set_option("codegen", False)
    try:
        test_a_graph_that_writes_to_what_exists_asks_first()
    finally:
        _C.set_option("codegen", True)


def test_an_operator_that_may_do_anything_breaks_the_graph():
    log = []

    @torch.library.custom_op("assertions::tell", mutates_args=())
    def tell(x: torch.Tensor) -> torch.Tensor:
        log.append(float(x.sum()))
        return x + 1

    tell.register_fake(torch.empty_like)

    def f(x):
        y = tell(x)
        assert (x > 0).all()
        return y

    assert breaks(f, POSITIVE) > 0
    log.clear()
    check(f, X)
    assert len(log) == 4


def test_generators_go_back():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    state = torch.zeros(())

    def f(x):
        y = net(x)
        state.add_(torch.rand(()))
        assert (x > 0).all()
        return y

    for x in (POSITIVE, X, POSITIVE):
        runs = []
        for function in (f, kiln.compile(f)):
            torch.manual_seed(0)
            state.zero_()
            runs.append((outcome(function, (x,), {}), state.clone(), torch.rand(2)))
        assert_same(*runs)


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

    assert breaks(f, X) == 0
    compiled, original = kiln.compile(f), copy.deepcopy(net.state_dict())
    for x in (X, X / 0, X):
        after = []
        for function in (f, compiled):
            net.load_state_dict(original)
            after.append((outcome(function, (x,), {}), [b.clone() for b in net.buffers()]))
        assert_same(*after)


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
        check(checked, LABELS)
    with kiln.config.patch(disable_passes="capture.assertions,capture.data_branches"):
        assert breaks(checked, LABELS) >= 1
        check(checked, LABELS)


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


def test_the_windows_of_an_inverse_transform():
    """istft raises if they leave gaps."""
    spectrum = torch.stft(torch.randn(2, 64), 16, 4, window=torch.hann_window(16), return_complex=True)

    def f(spectrum, window):
        return torch.istft(spectrum * 2, 16, 4, window=window, length=60) + 1

    assert breaks(f, spectrum, torch.hann_window(16)) == 0
    compiled = kiln.compile(f)
    for window in (torch.hann_window(16), torch.zeros(16), torch.hamming_window(16)):
        assert_same(
            outcome(compiled, (spectrum, window), {})[0][:2],
            outcome(f, (spectrum, window), {})[0][:2],
            rtol=1e-5,
            atol=1e-5,
        )


def test_distributions_in_a_training_step():
    """A policy's update, as reinforcement learning writes it; a step whose input is broken changes nothing."""

    def run(compiled):
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        target = copy.deepcopy(policy)
        opt = torch.optim.Adam(policy.parameters(), 1e-2)

        def step(x, action):
            mean, spread = policy(x).chunk(2, -1)
            d = D.Normal(mean, spread.exp())
            drawn = d.rsample()
            loss = (drawn.square() - d.log_prob(action) - 0.01 * d.entropy()).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            opt.step()
            for p, t in zip(policy.parameters(), target.parameters(), strict=True):
                t.data.copy_(0.1 * p.data + 0.9 * t.data)
            return loss

        function = kiln.compile(step, fullgraph=True) if compiled else step
        results = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(5, 3) if seed != 2 else torch.full((5, 3), torch.nan)
            try:
                results.append(function(x, torch.randn(5, 1)))
            except ValueError as error:
                results.append(str(error)[:40])
            results.append([t.clone() for t in (*policy.parameters(), *target.parameters())])
            results.append(torch.rand(2))
        return results

    assert_same(run(False), run(True), rtol=1e-4, atol=1e-5)


def test_a_distribution_with_a_wrong_argument():
    def f(scale):
        return D.Normal(torch.zeros(2), scale).sample()

    compiled = kiln.compile(f)
    for scale in (torch.ones(2), torch.tensor([1.0, -1.0]), torch.ones(2)):
        assert_same(*[outcome(g, (scale,), {}) for g in (f, compiled)])


LABELS = torch.tensor([1, 0, 3, 2])


def of_items(labels):
    assert labels.max().item() <= 3, "a label is too large"
    if labels.min().item() < 0:
        raise ValueError("a negative label")
    return labels * 2


def of_a_mean(labels):
    assert labels.float().mean().item() < 4
    return labels + 1


def checked(labels):
    torch._check_tensor_all(labels < 4)
    torch._check_tensor_all(labels >= 0, lambda: f"of {labels.numel()} labels")
    return labels * 3


def one_hot(labels):
    return F.one_hot(labels, 4), F.one_hot(labels[None], num_classes=6).float() * 2


def one_hot_of_a_permuted_one(labels):
    return F.one_hot(labels.reshape(2, 2).t(), 4)


def one_hot_of_a_write(labels):
    counts = torch.zeros(4)
    labels += 0
    return counts + F.one_hot(labels, 4).sum(0)


@pytest.mark.parametrize("f", [of_items, of_a_mean, checked, one_hot, one_hot_of_a_permuted_one])
def test_of_numbers_and_labels(f):
    assert breaks(f, LABELS) == 0
    compiled = kiln.compile(f, fullgraph=True)
    for x in (LABELS, torch.tensor([1, 0, 9, 2]), LABELS, torch.tensor([-1, 0, 1, 2]), torch.tensor([9, 9, -9, 9])):
        assert_same(*[outcome(g, (x.clone(),), {}) for g in (f, compiled)])


@pytest.mark.parametrize("f", [of_items, checked, one_hot])
def test_labels_of_a_graph_that_writes(f):
    """What it writes cannot be taken back, so that these assertions are asked before it runs."""

    def writes(labels, total):
        total += 1.5
        return f(labels), total * 2

    assert breaks(writes, LABELS, torch.zeros(2)) == 0
    compiled = kiln.compile(writes)
    for x in (LABELS, torch.tensor([1, 0, 9, 2]), LABELS, torch.tensor([-1, 0, 1, 2])):
        assert_same(*[outcome(g, (x.clone(), torch.ones(2)), {}) for g in (writes, compiled)])


def test_labels_that_the_graph_writes():
    check(one_hot_of_a_write, LABELS)
    compiled = kiln.compile(one_hot_of_a_write)
    for x in (LABELS, torch.tensor([1, 0, 9, 2])):
        assert_same(*[outcome(g, (x.clone(),), {}) for g in (one_hot_of_a_write, compiled)])


def test_one_hot_without_a_known_number_of_classes():
    check(lambda labels: F.one_hot(labels), LABELS)
    check(lambda labels: F.one_hot(labels, 3), torch.zeros(2, 0, dtype=torch.int64))
    check(lambda labels: F.one_hot(labels, 3), torch.zeros(3))


def test_one_hot_in_a_training_step():
    torch.manual_seed(0)
    start = nn.Linear(3, 4).state_dict()

    def run(wrap):
        model = nn.Linear(3, 4)
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, labels):
            optimizer.zero_grad()
            loss = ((model(x) - F.one_hot(labels, 4)) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(1)
        x = torch.randn(4, 3)
        losses = [step(x, LABELS) for _ in range(3)]
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            step(x, LABELS + 1)
        return losses, model.state_dict()

    assert_same(run(lambda f: f), run(lambda f: kiln.compile(f, fullgraph=True)), rtol=1e-5, atol=1e-6)
