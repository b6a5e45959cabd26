"""What the tests of compiled programs share: run in eager, run compiled, compare all that a user could see."""

import copy

import torch

import kiln
from kiln.testing import CompileCounter, assert_same, difference


def outcome(function, args, kwargs, seed=0):
    """What a call did: its result or exception, its arguments afterwards, and the random generator's state."""
    torch.manual_seed(seed)
    try:
        result = ("returned", function(*args, **kwargs))
        for t in tensors((result, args)):
            _ = t.is_leaf  # of a view whose base was written, autograd finds out now whether it may have been
    except Exception as error:
        result = ("raised", type(error), str(error))
    return result, args, kwargs, torch.get_rng_state()


def clone(tree, memo=None):
    """A copy of arguments that keeps strides, storages shared between tensors, requires_grad and identities."""
    memo = {} if memo is None else memo
    if id(tree) in memo:
        return memo[id(tree)]
    if (
        isinstance(tree, torch.Tensor)
        and type(tree) is torch.Tensor
        and tree.device.type == "cpu"
        and tree.layout == torch.strided
    ):
        storage = memo.get(("storage", tree.untyped_storage()._cdata))
        if storage is None:
            storage = tree.untyped_storage().clone()
            memo[("storage", tree.untyped_storage()._cdata)] = storage
        new = torch.empty(0, dtype=tree.dtype)
        new.set_(storage, tree.storage_offset(), tree.size(), tree.stride())
        if tree.requires_grad:
            new.requires_grad_(True)
    elif type(tree) in (list, tuple):
        new = type(tree)(clone(x, memo) for x in tree)
    elif type(tree) is dict:
        new = {k: clone(v, memo) for k, v in tree.items()}
    else:
        new = copy.deepcopy(tree, memo)
    memo[id(tree)] = new
    return new


def check(function, *args, calls=2, rtol=None, atol=None, seed=0, grad=True, compare_rng=True, **options):
    """Asserts that compiled equals eager for `calls` calls in a row: results, exceptions, what happened to the arguments,
    random numbers, and gradients of the inputs (of the results' float sum). Arguments are copied for each side.
    options go to kiln.compile. Returns the last compiled result.
    """
    compiled = kiln.compile(function, **options)
    last = None
    for call in range(calls):
        result = compare_call(function, compiled, args, f"call {call}", rtol, atol, seed + call, grad, compare_rng)
        last = result[-1]
    return last


def check_calls(function, calls, rtol=None, atol=None):
    """As check, with other arguments for each call. What overflows is not compared: it depends on the order of sums. Nor
    are the words of autograd's errors about views, which name its nodes."""
    compiled = kiln.compile(function)
    for number, args in enumerate(calls):
        compare_call(function, compiled, args, f"call {number}", rtol, atol, loose=True)


def compare_call(
    function,
    compiled,
    args,
    name,
    rtol=None,
    atol=None,
    seed=0,
    grad=True,
    compare_rng=True,
    loose=False,
):
    """Asserts that one call of `compiled` is as one of `function`; returns its outcome's first part."""
    eager_args, kiln_args = clone(args), clone(args)
    expected = outcome(function, eager_args, {}, seed)
    actual = outcome(compiled, kiln_args, {}, seed)
    assert expected[0][0] == actual[0][0], f"{name}: eager {brief(expected[0])}, compiled {brief(actual[0])}"
    if loose and not all(bool(torch.isfinite(t).all()) for t in tensors((expected[0], eager_args))):
        return actual[0]
    about_views = expected[0][0] == "raised" and "modified inplace" in expected[0][2]
    told = slice(0, 2) if loose and about_views else slice(None)
    found = difference(expected[0][told], actual[0][told], rtol, atol, f"{name}: result")
    assert found is None, found
    found = difference(expected[1], actual[1], rtol, atol, f"{name}: arguments afterwards")
    assert found is None, found
    written = [counted_writes(args) for args in (eager_args, kiln_args)]
    assert written[0] == written[1], f"{name}: autograd counts writes to the arguments {written} in eager and compiled"
    if compare_rng:
        assert torch.equal(expected[3], actual[3]), f"{name}: the random generator is in another state"
    assert aliasing(expected[0][1:], eager_args) == aliasing(actual[0][1:], kiln_args), f"{name}: aliasing differs"
    if grad:
        compare_gradients(expected[0], eager_args, actual[0], kiln_args, rtol, atol, name, loose)
    return actual[0]


def counted_writes(tree):
    """By tensor with elements, whether its version says that it was written (not how often: a graph writes once)."""
    return [t._version > 0 for t in tensors(tree) if t.numel() and not t.is_inference()]


def brief(outcome):
    return f"raised {outcome[1].__name__}: {outcome[2]}" if outcome[0] == "raised" else "returned"


def tensors(tree, found=None):
    found = [] if found is None else found
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for x in tree:
            tensors(x, found)
    elif isinstance(tree, dict):
        for x in tree.values():
            tensors(x, found)
    return found


def aliasing(results, args):
    """Which tensors share a storage, as indices of the first that has it; and which are the same object."""
    everything = tensors(args) + tensors(results)
    storages, objects, shape = {}, {}, []
    for index, t in enumerate(everything):
        storage = t.untyped_storage()._cdata if t.layout == torch.strided and t.numel() else ("none", index)
        shape.append((storages.setdefault(storage, index), objects.setdefault(id(t), index)))
    return shape


def compare_gradients(expected, expected_args, actual, actual_args, rtol, atol, name, loose=False):
    roots = [[t for t in tensors(r[1:]) if t.requires_grad and t.grad_fn is not None] for r in (expected, actual)]
    assert len(roots[0]) == len(roots[1]), f"{name}: other outputs require gradients"
    refused = [refuses_backward(found) for found in roots]
    if loose and refused[0]:  # a compiled backward may keep less than eager's, of what has changed since
        return
    assert refused[0] == refused[1], f"{name}: backward() raises {refused[0]} in eager, compiled {refused[1]}"
    for index, (e, a) in enumerate(zip(tensors(expected_args), tensors(actual_args))):
        if not e.is_leaf:
            continue
        found = difference(e.grad, a.grad, rtol, atol, f"{name}: gradient of tensor {index} of the arguments")
        assert found is None, found


def refuses_backward(roots):
    """Runs backward() of the weighted sum of tensors. Whether that raises: what was saved has changed, say."""
    if not roots:
        return False
    torch.manual_seed(0)
    try:
        sum(
            (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape)).sum() for t in roots
        ).backward()
    except RuntimeError:
        return True
    return False


def graphs(function, *args, **options):
    """How many graphs a backend is given while function(*args) runs compiled."""
    counter = CompileCounter()
    kiln.compile(function, backend=counter, **options)(*args)
    return counter.frame_count


def breaks(f, *args):
    """How many graph breaks a call of `f` has."""
    kiln.reset()
    return kiln.explain(f)(*args).graph_break_count


def training_step(model, optimizer):
    """A step that pulls the model's output to 0, and returns its loss."""

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training_results(f, module, x):
    """What a step of `module`, called as f(x), leaves: the output, the gradients of x and of the parameters, and the
    buffers, which start from their initial values."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    for name, b in module.named_buffers():
        b.fill_(1 if "var" in name else 0)
    y = f(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()], *[b.clone() for b in module.buffers()]]


# Of a first dimension, in the order in which a program meets them.
SIZES = (8, 7, 12, 4, 3, 9, 5)


def rows(n):
    return (torch.randn(n, 6),)


def check_sizes(f, sizes=SIZES, make=rows, entries=1, **options):
    """Compiled with open sizes equals eager for each size, three times; and is captured so many times."""
    compiled = kiln.compile(f, **{"dynamic": True, **options})
    for n in sizes:
        arguments = make(n)
        expected = f(*copy.deepcopy(arguments))
        for _ in range(3):
            assert_same(compiled(*copy.deepcopy(arguments)), expected)
    if entries is not None:
        assert len(compiled._entries) == entries
    return compiled


def logged_loops(capfd, function, *args):
    """The loops that a first call of `function` is compiled to, in text: as they are lowered, and as they are scheduled."""
    kiln.reset()
    capfd.readouterr()
    kiln.set_logs("loops")
    kiln.compile(function)(*args)
    kiln.set_logs("")
    return capfd.readouterr().err.split("after scheduling")
