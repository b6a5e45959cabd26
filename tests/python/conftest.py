"""The frame of all Python tests: kiln's own failures raise, every IR is verified, and each test starts from nothing."""

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("KILN_STRICT", "1")
os.environ.setdefault("KILN_VERIFY", "1")
os.environ.setdefault("KILN_DISK_CACHE", "0")  # what a test compiles is not from another run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest  # noqa: E402
import torch  # noqa: E402

import kiln  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--record-triton", metavar="FILE", help="keep the Triton kernels that run, to replay them on a GPU"
    )


def pytest_configure(config):
    if path := config.getoption("--record-triton"):
        from triton_records import Recorder

        config.add_cleanup(functools.partial(Recorder().save, path))


def pytest_collectstart(collector):
    """What a module draws while it is imported is the same in each run, whatever was imported before it."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh():
    """Forgets compiled code, and sets PyTorch's process-wide switches back."""
    torch.manual_seed(0)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    yield
    left_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    assert not left_on, "autocast was left on"
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    if hasattr(kiln._C, "reset"):
        kiln.reset()
    kiln.set_logs("")
