"""Shared set-up of the tests: offline, few threads, fixed seeds, and the trained model of the repository."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Proofs are stored here for the session, whose processes share them, and not in the user's home.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HF_PAGED_CACHE"] = tempfile.mkdtemp(prefix="hf_paged_tests_")

import pytest
import torch

# Before anything imports triton: without a GPU the kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
from hypothesis import HealthCheck, settings
from support import TRAINED_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged.errors import Reason

pytest_plugins = ["interpreted", "pytester", "tiers"]
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile(
    "hf_paged", deadline=None, derandomize=True, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("hf_paged")


def pytest_collection() -> None:
    """What modules and tests are made of stays: looking for garbage in it takes a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """A collection of garbage by a test need not look at torch, transformers and thousands of tests: half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["HF_PAGED_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    """A test must not leave global hooks, a default dtype or an ambient autocast to the next one."""
    yield
    assert torch.get_default_dtype() is torch.float32
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.fixture(autouse=True)
def _leaves_memory_to_other_processes(request: pytest.FixtureRequest):
    """Several of pytest-xdist may share the GPU, and some tests take tens of gigabytes."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def trained_path() -> str:
    """Path of the tiny trained model that lives in the repository."""
    return str(Path(__file__).parent.parent / TRAINED_MODEL)


@pytest.fixture(scope="session")
def _trained_model(trained_path):
    return AutoModelForCausalLM.from_pretrained(trained_path, dtype=torch.float32).eval()


@pytest.fixture
def trained_model(_trained_model):
    """The tiny trained model in fp32; disabled again after the test, whose duty it is to leave the weights alone."""
    yield _trained_model
    hf_paged.disable(_trained_model)


@pytest.fixture(scope="session")
def trained_tokenizer(trained_path):
    return AutoTokenizer.from_pretrained(trained_path, padding_side="left")


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def any_peft(monkeypatch):
    """transformers' own `add_adapter` and `load_adapter` take the installed PEFT: 5.24 asks for one to come."""
    integration = importlib.import_module("transformers.integrations.peft")
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "0.15")


@pytest.fixture
def lockstep_only(monkeypatch):
    """Every call of generate takes lockstep, or stock where that cannot have it."""
    reason = Reason("a test wants lockstep", remedy="Leave the fixture out.")
    monkeypatch.setattr("hf_paged.integration.generate._recognise", lambda *args: reason)


@pytest.fixture
def native_only(monkeypatch):
    """A call of generate that the engine does not carry out itself fails."""

    def refuse(engine, model, method, why, *args):
        raise AssertionError(f"not native: {why}")

    monkeypatch.setattr("hf_paged.integration.generate.run_or_fall_back", refuse)
