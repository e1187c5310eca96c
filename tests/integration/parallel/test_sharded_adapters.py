"""Adapters on one rank's part of a model, and what recognition says of models that are sharded by other means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from family_models import family_model
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_paged.integration.models import find_adapter
from hf_paged.integration.models.recognise import unsupported_reason
from hf_paged.integration.parallel.group import SINGLE, ParallelGroup
from hf_paged.integration.parallel.loading import load

VARIANTS = ["llama", "llama-3", "mistral", "qwen2", "qwen3-moe", "qwen3-moe-mixed"]


def sharded(variant: str, path: Path, rank: int = 1, size: int = 2) -> Any:
    family_model(variant, vocab_size=250).save_pretrained(path)
    return load(str(path), ParallelGroup(rank, size), device="cpu")


def adapter_of(model: Any) -> Any:
    return find_adapter(model)(model)  # type: ignore[misc]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ranks_part_is_recognised_with_its_own_sizes(variant: str, tmp_path: Path) -> None:
    whole, model = family_model(variant, vocab_size=250), sharded(variant, tmp_path)
    adapter, other = adapter_of(model), adapter_of(whole)
    assert unsupported_reason(adapter) is None
    assert (adapter.group.rank, adapter.group.size) == (1, 2) and other.group is SINGLE
    assert (adapter.kv_spec().num_kv_heads, other.kv_spec().num_kv_heads) == (1, 2)
    assert adapter.kv_spec()._replace(num_kv_heads=2) == other.kv_spec()
    assert adapter.vocab_size == other.vocab_size == 250
    assert adapter.step_bytes(100, 8) < other.step_bytes(100, 8)
    hidden = torch.randn(3, 64)
    assert torch.equal(other.shard_logits(hidden), other.logits(hidden))
    assert adapter.shard_logits(hidden).shape == (3, 128) and model.lm_head.num_real == 122


@pytest.mark.parametrize(("variant", "gate_up"), [("llama", [True, True]), ("qwen3-moe-mixed", [True, False])])
def test_column_parallel_layers_are_merged(variant: str, gate_up: list[bool], tmp_path: Path) -> None:
    model = sharded(variant, tmp_path)
    names = list(model.state_dict())
    adapter = adapter_of(model)
    adapter.prepare(64)
    assert [tuple(one.weight.shape) for one in adapter._qkv] == [(64, 64)] * 2  # 2 query heads, one key, one value
    assert [one is not None and one.weight is not None for one in adapter._gate_up] == gate_up
    assert adapter.is_current() and list(model.state_dict()) == names


def test_patched_experts_are_seen_through_their_sharded_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded("qwen3-moe", tmp_path)
    adapter = adapter_of(model)
    assert unsupported_reason(adapter) is None
    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", lambda self, x: x)
    assert "Qwen3MoeExperts._apply_gate is patched" in str(unsupported_reason(adapter))
    monkeypatch.undo()
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda self, x, *_: x)
    assert "not transformers' own" in str(unsupported_reason(adapter))


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "down_proj"])
def test_a_tuner_on_a_sharded_layer_is_refused(target: str, tmp_path: Path) -> None:
    """Its matrices would have to be sharded as well: those of a row-parallel layer would miss the sum over ranks."""
    model = sharded("llama", tmp_path)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[target]), model)
    assert f"{target} wraps a layer that is sharded over ranks" in str(unsupported_reason(adapter_of(model)))


def test_parts_of_parameters_that_others_keep_are_refused(tmp_path: Path) -> None:
    """DeepSpeed marks the parameters that it partitions; FSDP and DTensors: `test_model_over_ranks`."""
    model = family_model("llama")
    model.model.norm.weight.ds_id = 7
    reason = str(unsupported_reason(adapter_of(model)))
    assert "DeepSpeed" in reason and "PagedGenerator.from_pretrained(..., tensor_parallel_size=N)" in reason


def test_gradients_through_a_sharded_model_are_refused(tmp_path: Path) -> None:
    model = sharded("llama", tmp_path)
    with pytest.raises(RuntimeError, match="only generates"):
        model(torch.ones(1, 3, dtype=torch.int64))
