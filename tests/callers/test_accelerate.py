"""accelerate around an enabled model: prepared, unwrapped, trained, saved and loaded.

`tests/models/test_eligibility.py` has accelerate's autocast around one call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support import assert_native_parity, assert_same_tensor, batch, stock_copy, tiny_model

import hf_paged

PROMPTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


@pytest.fixture
def make_accelerator(no_accelerator_left):
    return lambda precision="no", **kwargs: accelerate.Accelerator(mixed_precision=precision, cpu=True, **kwargs)


def _train(accelerator: Any, model: Any, steps: int = 2) -> tuple[Any, list[float], list[torch.Tensor]]:
    """Prepare, then train with a generate before every step; the prepared model, losses, generations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(batch([24] * 2 * steps)["input_ids"], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, made = [], []
    for ids in loader:
        made.append(accelerator.unwrap_model(model).generate(**PROMPTS, **OPTIONS))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    made.append(accelerator.unwrap_model(model).generate(**PROMPTS, **OPTIONS))
    return model, losses, made


@pytest.mark.parametrize(("precision", "dtype"), [
    ("no", torch.float32), ("bf16", torch.float32), ("bf16", torch.bfloat16),
])
def test_training_with_generations_in_between_equals_stock(precision, dtype, make_accelerator):
    stock, stock_losses, expected = _train(make_accelerator(precision), tiny_model().to(dtype))
    model = hf_paged.enable(tiny_model().to(dtype), strict=True)
    trained, losses, actual = _train(make_accelerator(precision), model)
    assert losses == stock_losses
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_tensor(ours, theirs)
    assert not torch.equal(actual[0], actual[-1])
    made = sum(ids[:, PROMPTS["input_ids"].shape[1] :].numel() for ids in actual)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == made
    for ours, theirs in zip(trained.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("enable_first", [False, True])
def test_with_the_autocast_wrapper_and_unwrapped_a_model_computes_in_the_dtype_of_each(enable_first, make_accelerator):
    accelerator = make_accelerator("bf16")
    expected = tiny_model().generate(**PROMPTS, **OPTIONS)
    lower = accelerator.unwrap_model(accelerator.prepare(tiny_model())).generate(**PROMPTS, **OPTIONS)
    model = tiny_model()
    if enable_first:
        hf_paged.enable(model)
    prepared = accelerator.prepare(model)
    hf_paged.enable(prepared, strict=True)
    assert_native_parity(accelerator.unwrap_model(prepared), lower, **PROMPTS, **OPTIONS)
    assert hf_paged.get_engine(prepared).stats().shadow_bytes > 0
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert hf_paged.is_enabled(unwrapped)
    assert_native_parity(unwrapped, expected, **PROMPTS, **OPTIONS)
    assert hf_paged.get_engine(unwrapped).stats().shadow_bytes == 0


def test_generate_under_the_accelerators_autocast(make_accelerator):
    accelerator = make_accelerator("bf16")
    half, full = tiny_model().bfloat16(), tiny_model()
    expected = []
    for model in (half, full):
        with accelerator.autocast():
            expected.append(model.generate(**PROMPTS, **OPTIONS))
        hf_paged.enable(model)
    with accelerator.autocast():
        assert_native_parity(half, expected[0], **PROMPTS, **OPTIONS)
        assert_native_parity(full, expected[1], **PROMPTS, **OPTIONS)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def test_states_saved_after_native_calls_are_stocks_and_load_back(make_accelerator, tmp_path):
    """Merged weights are saved whole; what is loaded is what is generated with, whatever was cached before."""
    accelerator = make_accelerator()
    stock = accelerator.prepare(tiny_model())
    accelerator.save_state(tmp_path / "stock")
    accelerator.save_model(stock, tmp_path / "stock_model")
    accelerator.free_memory()

    accelerator = make_accelerator()
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hf_paged.enable(model, strict=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = assert_native_parity(model, **PROMPTS, **OPTIONS)
    accelerator.save_state(tmp_path / "ours")
    accelerator.save_model(model, tmp_path / "our_model")
    assert _files(tmp_path / "ours") == _files(tmp_path / "stock") != {}
    assert _files(tmp_path / "our_model") == _files(tmp_path / "stock_model") != {}

    ids = PROMPTS["input_ids"]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    trained = assert_native_parity(model, stock_copy(model).generate(**PROMPTS, **OPTIONS), **PROMPTS, **OPTIONS)
    assert not torch.equal(trained, first)
    accelerator.load_state(tmp_path / "ours")
    assert_native_parity(model, first, **PROMPTS, **OPTIONS)
    assert not optimizer.state_dict()["state"]
