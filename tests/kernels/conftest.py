"""Triton kernels run in Triton's interpreter where there is no GPU; it has to be chosen before Triton is imported."""

import os
import sys

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before TRITON_INTERPRET=1 was set: set it in tests/conftest.py")
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpreted") and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="the kernels are compiled here: the gpu tests cover them"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs a Triton kernel on CPU tensors")


@pytest.fixture
def make_generator():
    """Seeded generators for a device."""
    return lambda seed, device="cpu": torch.Generator(device).manual_seed(seed)
