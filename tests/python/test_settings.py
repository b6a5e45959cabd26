"""Settings of PyTorch that compiled code reads and sets."""

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kiln
from helpers import breaks


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    # PyTorch's own test utilities, once imported, forbid to write the flags.
    monkeypatch.setattr(torch.backends.m, "__allow_nonbracketed_mutation_flag", True)
    yield
    torch.backends.mkldnn.enabled = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_math_sdp(True)


def test_a_setting_that_is_read_is_a_guard():
    def f(x):
        return x * 2 if torch.backends.mkldnn.enabled else x * 3

    compiled = kiln.compile(f)
    x = torch.ones(2)
    for enabled in (True, False, True):
        torch.backends.mkldnn.enabled = enabled
        assert torch.equal(compiled(x), f(x))
    assert len(compiled._entries) == 2


def test_the_guard_is_printed():
    report = kiln.explain(lambda x: x * torch.get_num_threads())(torch.ones(2))
    assert f"get_num_threads() == {torch.get_num_threads()}" in "\n".join(str(g) for g in report.guards)


def test_what_is_set_stays_set():
    def f(x):
        torch.backends.cudnn.benchmark = True
        return x * 2

    compiled = kiln.compile(f)
    for _ in range(3):
        torch.backends.cudnn.benchmark = False
        compiled(torch.ones(2))
        assert torch.backends.cudnn.benchmark is True
        assert "benchmark" not in torch.backends.cudnn.__dict__
    assert breaks(f, torch.ones(2)) == 0


@pytest.mark.parametrize(
    "context",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True),
        lambda: torch.backends.cudnn.flags(enabled=False),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ],
)
def test_blocks_are_in_the_graph_and_leave_nothing(context):
    def settings():
        return [
            torch._C._get_math_sdp_enabled(),
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_sdp_priority_order(),
            torch.backends.cudnn.enabled,
            torch.backends.mkldnn.enabled,
            torch._C._is_multithreading_enabled(),
        ]

    def f(q):
        with context():
            return F.scaled_dot_product_attention(q, q, q) * 2

    q = torch.randn(1, 2, 8, 16)
    before = settings()
    assert breaks(f, q) == 0
    compiled = kiln.compile(f, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(q), f(q))
        assert settings() == before
    assert len(compiled._entries) == 1


def test_what_was_set_is_what_is_read():
    def f(x):
        was = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = not was
        now = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = was
        return x + (10 if was else 20) + (1 if now else 2)

    compiled = kiln.compile(f, fullgraph=True)
    for enabled in (True, False):
        torch.backends.mkldnn.enabled = enabled
        assert torch.equal(compiled(torch.zeros(1)), f(torch.zeros(1)))
        assert torch.backends.mkldnn.enabled is enabled


def test_a_break_sees_what_was_set():
    seen = []

    @kiln.disable
    def look():
        seen.append(torch.backends.mkldnn.enabled)

    def f(x):
        torch.backends.mkldnn.enabled = False
        x = x * 2
        look()
        x = x + torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = True
        return x

    compiled = kiln.compile(f)
    for _ in range(3):
        assert compiled(torch.ones(1)) == 2
        assert torch.backends.mkldnn.enabled is True
    assert seen == [False] * 3


def test_an_exception_leaves_what_was_set():
    def f(x):
        torch.backends.mkldnn.enabled = False
        x = x + 1
        raise ValueError("stop")

    compiled = kiln.compile(f)
    for _ in range(2):
        torch.backends.mkldnn.enabled = True
        with pytest.raises(ValueError, match="stop"):
            compiled(torch.ones(1))
        assert torch.backends.mkldnn.enabled is False


def test_matmul_precision():
    def f(x):
        torch.set_float32_matmul_precision("high")
        return x @ x if torch.get_float32_matmul_precision() == "high" else x

    before = torch.get_float32_matmul_precision()
    compiled = kiln.compile(f, fullgraph=True)
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            x = torch.randn(4, 4)
            torch.testing.assert_close(compiled(x), x @ x)
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


class Knob:
    """Keeps its value elsewhere, as attributes of torch.backends do."""

    def __get__(self, module, cls):
        return module.state["value"]

    def __set__(self, module, value):
        module.state["value"] = value * 2


class KnobModule(types.ModuleType):
    knob = Knob()


def test_descriptors_of_module_classes_are_called():
    module = KnobModule("knobs")
    module.state = {"value": 1}

    def f(x):
        module.knob = module.knob + 1
        return x * module.knob

    compiled = kiln.compile(f)
    values = [compiled(torch.ones(1)).item() for _ in range(3)]
    assert values == [4, 10, 22]
    assert module.state == {"value": 22} and "knob" not in module.__dict__


def test_generic_contexts_over_settings():
    @contextlib.contextmanager
    def one_thread_backward():
        before = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        try:
            yield
        finally:
            torch._C._set_multithreading_enabled(before)

    def f(x):
        with one_thread_backward():
            y = (x * x).sum()
        return y

    assert breaks(f, torch.ones(3)) == 0
