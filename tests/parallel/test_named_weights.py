"""Whole tensors by name into a rank's parts and back: each part is what loading a checkpoint would have made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from torch import nn

from hf_paged.parallel import named_weights
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import Shard
from hf_paged.parallel.loading import load
from hf_paged.parallel.named_weights import NamedWeights, ShardRange, WeightLocation, check_tensor, gather, write

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-3", {"vocab_size": 250}),
    ("qwen2", {"tie_word_embeddings": True, "vocab_size": 250}),
    ("qwen3-moe-mixed", {"num_key_value_heads": 1}),
    ("mistral", {"vocab_size": 16}),  # all of the vocabulary is on the first rank
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors go in many chunks, as large ones do."""
    monkeypatch.setattr(named_weights, "CHUNK_BYTES", 1500)


def pair(variant: str, overrides: dict, tmp_path: Path) -> tuple[Any, Any]:
    """Two models of one shape, the first one's checkpoint in "old", the second one's in "new"."""
    old, new = family_model(variant, **overrides), family_model(variant, **overrides)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    return old, new


def by_expert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As checkpoints of mixtures name it: a matrix an expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        experts, _, key = name.rpartition(".")
        if key == "gate_up_proj" and tensor.ndim == 3:
            for i, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                found |= {f"{experts}.{i}.gate_proj.weight": gate, f"{experts}.{i}.up_proj.weight": up}
        elif key == "down_proj" and tensor.ndim == 3:
            found |= {f"{experts}.{i}.down_proj.weight": matrix for i, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("experts_apart", [False, True])
@pytest.mark.parametrize(("variant", "overrides"), CASES)
def test_every_part_is_what_loading_makes_of_it(variant: str, overrides: dict, experts_apart: bool,
                                                tmp_path: Path) -> None:
    _, new = pair(variant, overrides, tmp_path)
    state = by_expert(new.state_dict()) if experts_apart else new.state_dict()
    for size in (1, 2, 4):
        for rank in range(size):
            group = ParallelGroup(rank, size)
            model, expected = (load(str(tmp_path / which), group, device="cpu") for which in ("old", "new"))
            weights, covered = NamedWeights(model), set()
            for name, tensor in state.items():
                check_tensor(name, tensor, weights)
                place = weights.place(name)
                assert write(place, tensor, SINGLE, compare=place.covers in covered)
                covered.add(place.covers)
            for name, parameter in expected.named_parameters():
                assert torch.equal(model.get_parameter(name), parameter), (name, rank, size)
            assert weights.missing(covered) == []


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("most_bytes", [1, 40, 1000])
def test_several_ranges_of_one_tensor_lie_one_after_the_other(dim: int, most_bytes: int) -> None:
    """As in a layer that holds gate and up, of each of which a rank has a part."""
    whole = torch.arange(80.0).view((10, 8) if dim == 0 else (8, 10))
    shard = Shard(tuple(whole.shape), dim, ((1, 4), (6, 9)))
    place = WeightLocation(torch.zeros(shard.part_shape), shard, ShardRange("gate_up"))
    for start, stop in place.chunks(most_bytes):
        for own, piece in place.pairs(start, whole[start:stop]):
            own.copy_(piece)
    assert torch.equal(place.data, shard.take(whole))


def test_what_is_missing_is_told_by_the_models_own_names(tmp_path: Path) -> None:
    _, new = pair("qwen3-moe", {}, tmp_path)
    weights = NamedWeights(new)
    state = by_expert(new.state_dict())
    left_out = [name for name in state if name.endswith((".3.up_proj.weight", "layers.0.input_layernorm.weight"))]
    covered = {weights.place(name).covers for name in state if name not in left_out}
    assert weights.missing(covered) == [
        "model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ]
    assert set(weights.missing(())) == set(new.state_dict())


def test_names_are_those_of_the_state_dict_and_tied_ones_come_once() -> None:
    tied = family_model("qwen2", tie_word_embeddings=True)
    assert [*NamedWeights(tied), "lm_head.weight"] == list(tied.state_dict())
    plain = family_model("llama-3")
    assert list(NamedWeights(plain)) == list(plain.state_dict())
    assert NamedWeights(plain).place("layers.1.mlp.up_proj.weight").covers.name == "model.layers.1.mlp.up_proj.weight"


def test_tied_weights_that_differ_are_noticed() -> None:
    model = family_model("qwen2", tie_word_embeddings=True)
    weights, other = NamedWeights(model), torch.randn(model.lm_head.weight.shape)
    embedding, head = weights.place("model.embed_tokens.weight"), weights.place("lm_head.weight")
    assert embedding.covers == head.covers
    assert write(embedding, other, SINGLE)
    assert write(head, other, SINGLE, compare=True)
    changed = other.clone()
    changed[-1, -1] += 1
    assert not write(head, changed, SINGLE, compare=True)
    assert torch.equal(model.lm_head.weight, other)


@pytest.mark.parametrize(("name", "tensor", "error", "message"), [
    ("model.norm.wieght", torch.ones(64), ValueError, "no tensor of the model: .* such as 'model.norm.weight'"),
    ("model.layers.0.mlp.experts.8.up_proj.weight", torch.ones(32, 64), ValueError, "expected one of 8 experts"),
    ("model.layers.0.mlp.experts.0.w1.weight", torch.ones(32, 64), ValueError, "no tensor of the model"),
    ("model.layers.0.self_attn.0.up_proj.weight", torch.ones(32, 64), ValueError, "no tensor of the model"),
    ("model.norm.weight", torch.ones(63), ValueError, r"has shape \(63,\): expected \(64,\)"),
    ("model.layers.0.mlp.experts.1.down_proj.weight", torch.ones(32, 64), ValueError, r"expected \(64, 32\)"),
    ("model.norm.weight", torch.ones(64, dtype=torch.int32), ValueError, "int32: expected a dtype of 16 bits"),
    ("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn), ValueError, "float8_e4m3fn: expected a dtype"),
    ("model.norm.weight", torch.ones(64, device="meta"), TypeError, "without memory"),
    ("model.norm.weight", [1.0] * 64, TypeError, "is a list: expected a torch.Tensor"),
    (3, torch.ones(64), TypeError, "got int for the name"),
])
def test_pairs_that_cannot_be_written(name: Any, tensor: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        check_tensor(name, tensor, NamedWeights(family_model("qwen3-moe")))


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_layer_is_refused_by_any_of_its_tensors(kept: torch.dtype) -> None:
    model = family_model("llama-3")
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape).to(kept), requires_grad=False)
    for name, shape in (("weight", (96, 64)), ("bias", (96,))):
        with pytest.raises(ValueError, match=rf"quantized or distributed layer \(Linear, whose weight is {kept}\)"):
            check_tensor(f"model.layers.0.mlp.up_proj.{name}", torch.ones(shape), NamedWeights(model))


class Peers(ParallelGroup):
    """Rank 0 of ranks that all live in this process: each collective is answered by the others' models."""

    def __init__(self, models: list[Any], name: str) -> None:
        super().__init__(0, len(models))
        self.weights, self.name, self.first = [NamedWeights(model) for model in models], name, 0

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        places = [weights.place(self.name) for weights in self.weights]
        return [[edge for pair in place.shard.ranges for edge in pair] for place in places]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = [weights.tensor(self.name)[self.first : self.first + len(tensor)] for weights in self.weights]
        self.first += len(tensor)
        return torch.stack([row.contiguous().view(torch.uint8) for row in rows])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "overrides"), CASES)
def test_parts_make_the_whole_again(variant: str, overrides: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = family_model(variant, **overrides).to(dtype)
    whole.save_pretrained(tmp_path)
    for size in (2, 4):
        models = [load(str(tmp_path), ParallelGroup(rank, size), device="cpu") for rank in range(size)]
        for name in NamedWeights(models[0]):
            found, expected = gather(NamedWeights(models[0]), name, Peers(models, name)), whole.state_dict()[name]
            assert found is not None and torch.equal(found, expected) and found.dtype == dtype, (name, size)
            assert found.data_ptr() != models[0].get_parameter(name).data_ptr()
