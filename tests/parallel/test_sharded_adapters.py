"""Adapters on one rank's part of a model, and what recognition says of models that are sharded by other means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from family_models import family_model
from support import HostMemory
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hf_paged
from hf_paged.errors import FallbackError
from hf_paged.models import find_executor, linears
from hf_paged.models.eligibility import why_not_native
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from hf_paged.parallel.loading import load

VARIANTS = ["llama", "llama-3", "mistral", "qwen2", "qwen3-moe", "qwen3-moe-mixed"]


def sharded(variant: str, path: Path, rank: int = 1, size: int = 2) -> Any:
    family_model(variant, vocab_size=250).save_pretrained(path)
    return load(str(path), ParallelGroup(rank, size), device="cpu")


def adapter_of(model: Any) -> Any:
    return find_executor(model)(model)  # type: ignore[misc]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ranks_part_is_recognised_with_its_own_sizes(variant: str, tmp_path: Path) -> None:
    whole, model = family_model(variant, vocab_size=250), sharded(variant, tmp_path)
    adapter, other = adapter_of(model), adapter_of(whole)
    assert why_not_native(adapter) is None
    assert (adapter.group.rank, adapter.group.size) == (1, 2) and other.group is SINGLE
    assert (adapter.kv_spec().num_kv_heads, other.kv_spec().num_kv_heads) == (1, 2)
    assert adapter.kv_spec()._replace(num_kv_heads=2, num_heads=4) == other.kv_spec()
    assert adapter.vocab_size == other.vocab_size == 250
    assert adapter.step_bytes(100, 8) <= other.step_bytes(100, 8)
    assert variant == "qwen3-moe" or adapter.step_bytes(100, 8) < other.step_bytes(100, 8)  # where MLPs are the widest
    hidden = torch.randn(3, 64)
    assert torch.equal(other.shard_logits(hidden), other.logits(hidden))
    assert adapter.shard_logits(hidden).shape == (3, 128) and model.lm_head.num_real == 122


@pytest.mark.parametrize(("variant", "gate_up"), [("llama", [True, True]), ("qwen3-moe-mixed", [True, False])])
def test_column_parallel_layers_are_merged(variant: str, gate_up: list[bool], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    model = sharded(variant, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    adapter = adapter_of(model)
    adapter.prepare(64)
    heads, inner = ([getattr(layer, name) for layer in adapter._layer_parts] for name in ("qkv", "gate_up"))
    assert [tuple(one.weight.shape) for one in heads] == [(64, 64)] * 2  # 2 query heads, one key, one value
    assert [one is not None and one.weight is not None for one in inner] == gate_up
    assert adapter.is_current() and [name for name, _ in model.named_parameters()] == names


def test_storages_of_loaded_weights_can_be_resized(tmp_path: Path) -> None:
    assert all(p.untyped_storage().resizable() for p in sharded("qwen3-moe-mixed", tmp_path).parameters())


def test_patched_experts_are_seen_through_their_sharded_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded("qwen3-moe", tmp_path)
    adapter = adapter_of(model)
    assert why_not_native(adapter) is None
    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", lambda self, x: x)
    assert "Qwen3MoeExperts._apply_gate is patched" in str(why_not_native(adapter))
    monkeypatch.undo()
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda self, x, *_: x)
    assert "Qwen3MoeExperts.forward is patched" in str(why_not_native(adapter))


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "down_proj"])
def test_a_tuner_on_a_sharded_layer_is_refused(target: str, tmp_path: Path) -> None:
    """Its matrices would have to be sharded as well: those of a row-parallel layer would miss the sum over ranks."""
    model = sharded("llama", tmp_path)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[target]), model)
    assert f"{target} wraps a layer that is sharded over ranks" in str(why_not_native(adapter_of(model)))


def replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 250, bias=False)


def replace_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(250, 64))


def whole_weight(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.zeros(64, 96))


def other_ranks(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.group = ParallelGroup(0, 2)


@pytest.mark.parametrize(("change", "reason"), [
    (replace_head, "lm_head is a whole Linear in a model that is sharded"),
    (replace_embedding, "model.embed_tokens is a whole Embedding in a model that is sharded"),
    (whole_weight, r"down_proj.weight has shape \(64, 96\): expected this rank's part, \(64, 48\)"),
    (other_ranks, "down_proj is sharded over other ranks"),
    (lambda model: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["down_proj"]), model), "wraps a layer"),
])
def test_parts_that_do_not_fit_go_nowhere(change: Any, reason: str, tmp_path: Path) -> None:
    """Stock generate would run their forwards as well, and be as wrong as the engine."""
    model = sharded("llama", tmp_path)
    hf_paged.enable(model, num_blocks=8)
    change(model)
    with pytest.raises(FallbackError, match=reason), torch.no_grad():
        model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    hf_paged.disable(model)


def test_a_part_is_neither_saved_nor_resized(tmp_path: Path) -> None:
    """Under stock's names it would be taken for the whole. With one rank it is the whole."""
    model = sharded("qwen3-moe", tmp_path)
    for module in (model, model.model.layers[0].mlp.experts, model.lm_head):
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 holds a part: expected a model that is not sharded"):
            module.state_dict()
    with pytest.raises(RuntimeError, match=r"state_dict of model\.embed_tokens"):
        model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    with pytest.raises(RuntimeError, match="expected a checkpoint that was resized before"):
        model.resize_token_embeddings(260)
    assert why_not_native(adapter_of(model)) is None
    whole = load(str(tmp_path), SINGLE, device="cpu")
    assert whole.resize_token_embeddings(260).weight.shape == (260, 64) and len(whole.state_dict()) > 0


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead])
def test_patched_forwards_of_sharded_layers_are_seen(kind: type, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded("llama", tmp_path)
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert f"{kind.__name__}.forward is patched" in str(why_not_native(adapter_of(model)))
    monkeypatch.undo()
    assert why_not_native(adapter_of(model)) is None
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert "Linear.forward is patched" in str(why_not_native(adapter_of(model)))


def test_parts_of_parameters_that_others_keep_are_refused(tmp_path: Path) -> None:
    """DeepSpeed marks the parameters that it partitions; FSDP and DTensors: `test_model_over_ranks`."""
    model = family_model("llama")
    model.model.norm.weight.ds_id = 7
    reason = why_not_native(adapter_of(model)).with_remedy
    assert "DeepSpeed" in reason and "deepspeed.zero.GatheredParameters" in reason


def test_gradients_through_a_sharded_model_are_refused(tmp_path: Path) -> None:
    model = sharded("llama", tmp_path)
    with pytest.raises(RuntimeError, match="only generates"):
        model(torch.ones(1, 3, dtype=torch.int64))
