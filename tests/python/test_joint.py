"""Joint graphs, partition and the compiled autograd node: everything as in eager."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from kiln import _C


def clone_args(args):
    return [a.detach().clone().requires_grad_(a.requires_grad) for a in args]


def flat(value):
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    return list(value)


def loss_of(outputs):
    terms = [o.float().sin().sum() * (i + 1) for i, o in enumerate(outputs) if o is not None and o.requires_grad]
    return sum(terms) if terms else None


def assert_same(a, b):
    assert (a is None) == (b is None)
    if a is None:
        return
    assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    assert a.requires_grad == b.requires_grad
    torch.testing.assert_close(a.detach(), b.detach(), equal_nan=True, rtol=1e-5, atol=1e-4)


def check(fn, *args, partition="min_cut", calls=2):
    """Outputs, aliasing, input changes and gradients of `calls` calls equal eager's."""
    compiled = _C._joint_compile(fn, list(args), partition)
    for _ in range(calls):
        eager_args, our_args = clone_args(args), clone_args(args)
        torch.manual_seed(1)
        expected = flat(fn(*eager_args))
        state = torch.get_rng_state()
        torch.manual_seed(1)
        got = compiled(our_args)
        assert torch.equal(state, torch.get_rng_state())
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
        for i, e in enumerate(expected):
            for j, f in enumerate(expected):
                if e is not None and f is not None:
                    assert (e is f) == (got[i] is got[j])
                    same = e.untyped_storage().data_ptr() == f.untyped_storage().data_ptr()
                    assert same == (got[i].untyped_storage().data_ptr() == got[j].untyped_storage().data_ptr())
            for a, b in zip(eager_args, our_args, strict=True):
                if e is not None:
                    same = e.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
                    assert same == (got[i].untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
                    assert (e is a) == (got[i] is b)
        for a, b in zip(eager_args, our_args, strict=True):
            assert_same(a, b)
        loss, our_loss = loss_of(expected), loss_of(got)
        assert (loss is None) == (our_loss is None)
        if loss is not None:
            loss.backward()
            our_loss.backward()
            for a, b in zip(eager_args, our_args, strict=True):
                if a.is_leaf:
                    assert_same(a.grad, b.grad)
    return compiled


def p(*shape):
    return torch.randn(shape, requires_grad=True)


def t(*shape):
    return torch.randn(shape)


def mlp(x, w1, b1, w2):
    return F.cross_entropy(F.gelu(F.linear(x, w1, b1)) @ w2, torch.tensor([0, 1, 2, 0]))


def conv_bn(x, w, g, b, mean, var):
    return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), mean, var, g, b, training=True)).mean()


def attention(x, wq, wk, wv):
    q, k, v = ((x @ w).view(2, 5, 2, 4).transpose(1, 2) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)


def no_grad_inside(x, w):
    with torch.no_grad():
        scale = (x * w).abs().max()
    return x * w / scale


CASES = {
    "mlp": (mlp, t(4, 6), p(8, 6), p(8), p(8, 3)),
    "conv_bn": (conv_bn, t(2, 3, 5, 5), p(4, 3, 3, 3), p(4), p(4), torch.zeros(4), torch.ones(4)),
    "attention": (attention, t(2, 5, 8), p(8, 8), p(8, 8), p(8, 8)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), p(4, 6), p(6), p(6)),
    "dropout": (lambda x: F.dropout(x * 2, 0.5) + F.dropout(x, 0.3), p(4, 6)),
    "in_place": (lambda x, w: x.mul(2).add_(w).relu_(), t(4, 6), p(6)),
    "in_place_view": (lambda x: (lambda y: (y[1:3].mul_(3), y)[1])(x * 2), p(4, 6)),
    "input_mutation": (lambda x, w: (x.add_(1), (x * w).sum())[1], t(4, 6), p(6)),
    "input_mutation_by_param": (lambda x, w: (x.mul_(w), x.sum())[1], t(4, 6), p(6)),
    "mutated_input_returned": (lambda x, w: (x.add_(1), x * w), t(4, 6), p(6)),
    "input_view": (lambda x: (x[1:], x.t(), x.detach(), x), p(4, 6)),
    "input_view_and_mutation": (lambda x: (x.view(-1)[2:5].zero_(), x * 2), t(4, 6)),
    "shared_outputs": (lambda x: (lambda y: (y, y[1:], y.view(-1), y.detach()))(x * 2), p(4, 6)),
    "same_output_twice": (lambda x: (lambda y: (y, y))(x * 2), p(4, 6)),
    "equal_outputs": (lambda x: (x + 1, x + 1), p(4, 6)),
    "view_of_intermediate": (lambda x: (x * 2).t(), p(4, 6)),
    "none_output": (lambda x: (x * 2, None), p(4, 6)),
    "integer_output": (lambda x: (x.argmax(1), x * 2), p(4, 6)),
    "no_grad_inside": (no_grad_inside, t(4, 6), p(6)),
    "detached_part": (lambda x: x * x.detach(), p(4, 6)),
    "constant": (lambda x: x * torch.tensor(2.5) + torch.tensor([1.0, 2.0, 3.0]), p(4, 3)),
    "constant_output": (lambda x: (torch.ones(3), torch.tensor(2.0), x + 1), p(2)),
    "unused_input": (lambda x, w: x * 2, p(3), p(3)),
    "all_inference": (lambda x, y: (x @ y).softmax(-1), t(4, 6), t(6, 4)),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [1, 1]]), w), p(4, 6)),
    "cat_split": (lambda x, y: torch.cat([x, y], 1).split([5, 4], 1), p(4, 6), p(4, 3)),
    "bfloat16": (lambda x, w: (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).float(), t(4, 6), p(6, 3)),
    "pooling": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), p(2, 3, 4, 4)),
    "index_put": (lambda x, v: x.clone().index_put_((torch.tensor([0, 2]),), v), p(4, 6), p(2, 6)),
    "where_masked": (lambda x: torch.where(x > 0, x, x * 0.1).masked_fill(x > 1, 0.0), p(4, 6)),
    "lstm_cell": (
        lambda x, h, c, w, u: (
            lambda i, f, g, o: (lambda d: (o.sigmoid() * d.tanh(), d))(f.sigmoid() * c + i.sigmoid() * g.tanh())
        )(*(x @ w + h @ u).chunk(4, 1)),
        t(2, 3),
        t(2, 4),
        t(2, 4),
        p(3, 16),
        p(4, 16),
    ),
    "expanded_input": (lambda x, w: x.expand(4, 6) * w, p(1, 6), p(4, 6)),
    "zero_size": (lambda x, w: (x * w).sum(0), p(0, 6), p(6)),
    "zero_dim": (lambda x, w: x * w + 1, p(), p()),
    "batch_norm_eval": (
        lambda x, m, v, w: F.batch_norm(x, m, v, w, training=False),
        t(4, 3),
        torch.zeros(3),
        torch.ones(3),
        p(3),
    ),
}


@pytest.mark.parametrize("partition", ["min_cut", "default"])
@pytest.mark.parametrize("name", CASES)
def test_as_eager(name, partition):
    fn, *args = CASES[name]
    check(fn, *args, partition=partition)


def test_channels_last_keeps_strides():
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    compiled = _C._joint_compile(lambda x, w: F.relu(F.conv2d(x, w)), [x, p(4, 3, 3, 3)])
    w = p(4, 3, 3, 3)
    assert_same(compiled([x, w])[0], F.relu(F.conv2d(x, w)))


def test_non_leaf_inputs_get_gradients():
    fn = lambda x, w: torch.tanh(x * w)  # noqa: E731
    base, w = p(4, 6), p(6)
    compiled = _C._joint_compile(fn, [base * 2, w])
    for _ in range(2):
        (expected,) = torch.autograd.grad(fn(base * 2, w).sum(), base)
        (got,) = torch.autograd.grad(compiled([base * 2, w])[0].sum(), base)
        torch.testing.assert_close(got, expected)


def test_mutated_non_leaf_input_keeps_history():
    def fn(x, w):
        x.mul_(w)
        return x.sum()

    w, base = p(6), p(4, 6)
    compiled = _C._joint_compile(fn, [base * 1, w])
    x, y = base * 1, base * 1
    (fn(x, w) + x.sum()).backward()
    expected = base.grad.clone(), w.grad.clone()
    base.grad = w.grad = None
    (compiled([y, w])[0] + y.sum()).backward()
    torch.testing.assert_close(base.grad, expected[0])
    torch.testing.assert_close(w.grad, expected[1])


def test_second_backward_is_refused_and_retain_graph_works():
    x = p(4)
    (out,) = _C._joint_compile(lambda x: (x * x).sum(), [x])([x])
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_changed_saved_tensor_is_refused():
    x, w = torch.randn(4), p(4)
    (out,) = _C._joint_compile(lambda x, w: (x * w).sum(), [x, w])([x, w])
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_double_backward():
    x = p(4)
    fn = lambda x: (x**3).sum()  # noqa: E731
    from kiln import _C as c

    compiled = c._joint_compile(fn, [x])
    (g,) = torch.autograd.grad(compiled([x])[0], x, create_graph=True)
    torch.testing.assert_close(g.detach(), 3 * x.detach() ** 2)
    (gg,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(gg, 6 * x.detach())


def test_saved_tensor_hooks_are_called():
    packed = []
    x, w = torch.randn(4, 4), p(4, 4)
    compiled = _C._joint_compile(lambda x, w: torch.tanh(x @ w).sum(), [x, w])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        (out,) = compiled([x, w])
    assert packed
    out.backward()
    expected = torch.autograd.grad(torch.tanh(x @ w).sum(), w)[0]
    torch.testing.assert_close(w.grad, expected)


def test_whole_sgd_step():
    def step(x, y, w1, w2):
        loss = F.mse_loss(torch.relu(x @ w1) @ w2, y)
        loss.backward()
        with torch.no_grad():
            for w in (w1, w2):
                w.add_(w.grad, alpha=-0.1)
        return loss

    x, y = t(4, 6), t(4, 3)
    a, b = [p(6, 8), p(8, 3)], None
    b = clone_args(a)
    compiled = _C._joint_compile(step, [x, y, *b])
    for _ in range(5):
        for w in a:
            w.grad = None
        expected = step(x, y, *a)
        (got,) = compiled([x, y, *b])
        torch.testing.assert_close(got, expected)
        for v, w in zip(a, b, strict=True):
            torch.testing.assert_close(v, w)
    assert got.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        got.backward()


def test_whole_adam_step():
    def step(x, w, m, v, k):
        ((x @ w) ** 2).sum().backward()
        with torch.no_grad():
            k.add_(1)
            m.lerp_(w.grad, 0.1)
            v.mul_(0.999).addcmul_(w.grad, w.grad, value=0.001)
            w.addcdiv_(m / (1 - 0.9**k), (v / (1 - 0.999**k)).sqrt_().add_(1e-8), value=-0.01)

    x = t(4, 6)
    a = [p(6, 8), torch.zeros(6, 8), torch.zeros(6, 8), torch.zeros(())]
    b = clone_args(a)
    compiled = _C._joint_compile(step, [x, *b])
    for _ in range(5):
        a[0].grad = None
        step(x, *a)
        compiled([x, *b])
        for v, w in zip(a, b, strict=True):
            torch.testing.assert_close(v, w)


def test_min_cut_saves_less_than_saving_all():
    def fn(x):
        for _ in range(4):
            x = (x * 2 + 1).abs() * x
        return x

    def saved_bytes(partition):
        return _C._joint_trace(fn, [p(64, 64)], partition)["num_saved"]

    assert saved_bytes("min_cut") < saved_bytes("default")


def test_random_ops_are_not_run_again():
    trace = _C._joint_trace(lambda x: F.dropout(x.relu(), 0.5).relu(), [p(8, 8)])
    assert "bernoulli" in trace["forward"] and "bernoulli" not in trace["backward"]


def test_unsupported_effects_are_named():
    with pytest.raises(Exception, match="sizes or strides"):
        _C._joint_trace(lambda x: x.t_(), [t(2, 3)])
    x = t(4, 4)
    with pytest.raises(Exception, match="share memory"):
        _C._joint_trace(lambda a, b: a.add_(1), [x[:3], x[1:]])


def test_module_with_batch_norm_statistics():
    bn = nn.BatchNorm1d(3)
    fn = lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True, momentum=0.1)  # noqa: E731
    args = [t(8, 3), *clone_args([bn.weight, bn.bias, bn.running_mean, bn.running_var])]
    check(fn, *args)
