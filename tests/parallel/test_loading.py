"""Loading one rank's part: which bytes, from every form of a checkpoint, in how much memory, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_models import LOCAL_EXPERTS, derived_model
from family_models import family_model
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from hf_paged.errors import UnsupportedModelError
from hf_paged.parallel import checkpoint
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import shard_of
from hf_paged.parallel.loading import load

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-3", {"vocab_size": 250}),
    ("mistral", {"vocab_size": 2050}),
    ("qwen2", {"tie_word_embeddings": True, "vocab_size": 250}),
    ("qwen3-moe", {}),
    ("qwen3-moe-mixed", {"num_key_value_heads": 1}),
]


def expected_part(name: str, whole: torch.Tensor, config: Any, rank: int, size: int) -> torch.Tensor:
    """This rank's part of a stock parameter, written down without any of the code under test."""
    if "embed_tokens" in name or "lm_head" in name:
        multiple = 1024 if whole.shape[0] > 1024 * size else 16
        rows = whole.shape[0] if size == 1 else -(-whole.shape[0] // (multiple * size)) * multiple
        padded = torch.cat([whole, whole.new_zeros(size * rows - whole.shape[0], whole.shape[1])])
        return padded[rank * rows : (rank + 1) * rows]
    if "k_proj" in name or "v_proj" in name:
        heads = whole.unflatten(0, (config.num_key_value_heads, 16))
        copies = max(1, size // config.num_key_value_heads)
        return heads.repeat_interleave(copies, 0).chunk(size)[rank].flatten(0, 1)
    if "gate_up_proj" in name:
        gate, up = whole.chunk(2, 1)
        return torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1)
    if name.endswith("experts.down_proj"):
        return whole.chunk(size, 2)[rank]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return whole.chunk(size, 1)[rank]
    if any(key in name for key in ("q_proj", "gate_proj", "up_proj")):
        return whole.chunk(size, 0)[rank]
    return whole


def assert_parts(path: Path, whole: Any, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
    state = dict(whole.named_parameters(remove_duplicate=False))
    for size in sizes:
        for rank in range(size):
            model = load(str(path), ParallelGroup(rank, size), device="cpu")
            assert not model.training
            found = dict(model.named_parameters(remove_duplicate=False))
            assert list(found) == list(state)
            for name, tensor in found.items():
                part = expected_part(name, state[name], whole.config, rank, size)
                assert torch.equal(tensor, part), (name, rank, size)
            assert torch.equal(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are read in many chunks and batches, as large ones are."""
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 1500)
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 9000)


@pytest.mark.each_value
@pytest.mark.parametrize("shard_size", ["40KB", "1GB"])
@pytest.mark.parametrize(("variant", "overrides"), CASES)
def test_every_parameter_is_the_expected_part(variant: str, overrides: dict, shard_size: str, tmp_path: Path) -> None:
    whole = family_model(variant, **overrides)
    whole.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    assert_parts(tmp_path, whole)


def rewrite(path: Path, change: Any) -> None:
    """The single file of a checkpoint with other tensors."""
    tensors = load_file(path / "model.safetensors")
    save_file({key: t.contiguous() for key, t in change(tensors).items()}, path / "model.safetensors")


def test_experts_in_both_key_formats(tmp_path: Path) -> None:
    """`save_pretrained` writes a matrix an expert, as hub checkpoints have; fused keys are the model's own."""
    whole = family_model("qwen3-moe")
    whole.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in file.keys()  # noqa: SIM118
    rewrite(tmp_path, lambda _: whole.state_dict())
    assert_parts(tmp_path, whole, (2,))


@pytest.mark.parametrize("tied", [False, True])
def test_keys_without_the_prefix(tied: bool, tmp_path: Path) -> None:
    whole = family_model("llama", tie_word_embeddings=tied)
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key.removeprefix("model."): t for key, t in tensors.items()})
    assert_parts(tmp_path, whole, (2,))


def test_tied_heads_that_the_file_has_as_well_or_alone(tmp_path: Path) -> None:
    whole = family_model("llama", tie_word_embeddings=True, vocab_size=250)
    embedding = "model.embed_tokens.weight"
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})
    assert_parts(tmp_path, whole, (2,))
    rewrite(tmp_path, lambda tensors: {key: t for key, t in tensors.items() if key != embedding})
    assert_parts(tmp_path, whole, (2,))
    rewrite(tmp_path, lambda tensors: tensors | {embedding: tensors["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding, .*expected tie_word_embeddings=False"):
        load(str(tmp_path), ParallelGroup(1, 2), device="cpu")


def test_old_frequencies_are_ignored_as_in_transformers(tmp_path: Path) -> None:
    whole = family_model("llama")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_parts(tmp_path, whole, (2,))


def test_dtypes(tmp_path: Path) -> None:
    whole = family_model("llama").bfloat16()
    whole.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    part = whole.get_parameter(name).detach()[:, 48:]
    group = ParallelGroup(1, 2)
    for dtype, expected in (("auto", torch.bfloat16), (None, torch.bfloat16), ("float32", torch.float32),
                            (torch.float16, torch.float16)):
        model = load(str(tmp_path), group, dtype=dtype, device="cpu")
        assert {p.dtype for p in model.parameters()} == {expected}
        assert torch.equal(model.get_parameter(name), part.to(expected))
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "dtype"}))
    assert load(str(tmp_path), group, device="cpu").lm_head.weight.dtype == torch.bfloat16  # of the first tensor
    for wrong in ("int8", "fp32", 3):
        with pytest.raises(ValueError, match=f"dtype={wrong!r}: expected 'auto'"):
            load(str(tmp_path), group, dtype=wrong, device="cpu")


@pytest.mark.parametrize("own_settings", [True, False])
def test_the_rest_of_the_model_is_from_pretrained(own_settings: bool, tmp_path: Path) -> None:
    """Generation config, config, buffers, requires_grad: compared with what `from_pretrained` gives."""
    whole = family_model("qwen3-moe")
    whole.generation_config = GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=[3, 4])
    whole.save_pretrained(tmp_path)
    if not own_settings:
        (tmp_path / "generation_config.json").unlink()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load(str(tmp_path), SINGLE, device="cpu")
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()
    assert (model.generation_config.temperature == 0.5) == own_settings
    assert model.config.to_dict() == stock.config.to_dict() and model.name_or_path == stock.name_or_path
    assert model.config._attn_implementation == stock.config._attn_implementation
    assert model.config._experts_implementation == stock.config._experts_implementation
    assert {n: b.dtype for n, b in model.named_buffers()} == {n: b.dtype for n, b in stock.named_buffers()}
    assert all(p.requires_grad for p in model.parameters()) and all(p.requires_grad for p in stock.parameters())
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)


def drop(*keys: str) -> Any:
    return lambda tensors: {key: t for key, t in tensors.items() if key not in keys}


NORM = "model.layers.1.input_layernorm.weight"
EXPERT, COMMON = (f"model.layers.1.mlp.experts.{name}" for name in ("5.up_proj.weight", "gate_up_proj"))


@pytest.mark.parametrize(("change", "message"), [
    (drop(NORM), rf"{NORM} is missing: expected it with shape \(64,\) in .*model\.safetensors"),
    (drop("lm_head.weight"), r"lm_head\.weight is missing: expected it with shape \(256, 64\)"),
    (drop(EXPERT), rf"{EXPERT} is missing: expected it with shape \(32, 64\)"),
    (lambda t: t | {"model.layers.2.x": torch.zeros(1)}, r"model\.layers\.2\.x in .*safetensors is no parameter"),
    (lambda t: t | {NORM: torch.zeros(65)}, rf"{NORM} in .*model\.safetensors has shape \(65,\): expected \(64,\)"),
    (lambda t: t | {EXPERT: torch.zeros(32, 65)}, rf"{EXPERT} in .* has shape \(32, 65\): expected \(32, 64\)"),
    (lambda t: t | {NORM.removeprefix("model."): t[NORM].clone()}, r"layernorm\.weight in .* is there in two forms"),
    (lambda t: t | {COMMON: torch.zeros(8, 64, 64)}, r"mlp\.experts\..* in .* is there in two forms"),
    (lambda t: t | {NORM: torch.zeros(64, dtype=torch.int8)}, rf"{NORM} in .*safetensors is I8: expected"),
])
def test_a_bad_tensor_is_named(change: Any, message: str, tmp_path: Path) -> None:
    family_model("qwen3-moe").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    for rank in range(2):  # of all ranks, whichever holds it
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path), ParallelGroup(rank, 2), device="cpu")


def test_bad_files_are_named(tmp_path: Path) -> None:
    family_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    whole = second.read_bytes()
    second.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=f"{second.name}: expected a whole safetensors file"):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu")
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"{second.name} is missing, which model.safetensors.index.json names"):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu")
    for file in (first, *tmp_path.glob("*.safetensors*")):
        file.unlink(missing_ok=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or .*index\.json; found .*pytorch_model"):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu")


def test_an_index_or_a_key_that_leaves_a_choice_is_refused(tmp_path: Path) -> None:
    family_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {key: tensor + 1}, second)
    with pytest.raises(ValueError, match=rf"{key} is in .*{first.name} and in .*{second.name}"):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu")
    for text in ("{}", "[1]", "no JSON", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json: expected JSON with a weight_map"):
            load(str(tmp_path), ParallelGroup(0, 2), device="cpu")


def test_an_adapter_beside_the_weights_is_not_left_out(tmp_path: Path) -> None:
    """transformers' from_pretrained puts it on the model."""
    family_model("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json: an adapter, which cannot be sharded: .*merge_and"):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu")


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    family_model("gpt-oss").save_pretrained(tmp_path / "oss")
    with pytest.raises(UnsupportedModelError, match=r"GptOssForCausalLM cannot .* no tensor-parallel plan"):
        load(str(tmp_path / "oss"), ParallelGroup(0, 2), device="cpu")
    family_model("llama").save_pretrained(tmp_path / "quantized")
    file = tmp_path / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"is quantized .*fp8.*: expected float weights"):
        load(str(tmp_path / "quantized"), ParallelGroup(0, 2), device="cpu")


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    home = tmp_path / "models--somebody--tiny"
    whole = family_model("llama")
    whole.save_pretrained(home / "snapshots" / revision, max_shard_size="40KB")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=False)
    model = load("somebody/tiny", ParallelGroup(0, 2), device="cpu")
    assert torch.equal(model.model.norm.weight, whole.model.norm.weight)


def test_what_is_called_meanwhile_may_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between chunks, and not after all of them; its error is the one that is raised, and no thread reads on."""
    family_model("llama").save_pretrained(tmp_path)
    fill, calls = checkpoint._fill, []

    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        calls.append("fill")
        time.sleep(0.25)
        fill(target, source)

    def check() -> None:
        calls.append("check")
        if calls.count("check") == 4:
            raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "_fill", slowly)
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 256)
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 256)
    with pytest.raises(ZeroDivisionError):
        load(str(tmp_path), ParallelGroup(0, 2), device="cpu", check=check)
    assert calls.count("check") == 4 and 1 <= calls.count("fill") < 30
    ended = len(calls)
    time.sleep(0.6)
    assert len(calls) == ended


def sparse_checkpoint(path: Path, config: LlamaConfig) -> int:
    """A file of zeros that takes no space on the disk; returns the bytes of its tensors."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    header, offset = {}, 0
    for key, tensor in state.items():
        end = offset + 2 * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    config.save_pretrained(path)
    return offset


@pytest.mark.slow
def test_host_memory_stays_at_the_shard_and_a_few_chunks(tmp_path: Path) -> None:
    """Loading a quarter of 0.3 GB, 8 MiB at a time: mapped pages, too, are given up as it goes on."""
    config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4,
                         num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16")
    total = sparse_checkpoint(tmp_path, config)
    (shard, peak), = run_ranks("rank_checks:memory_of_loading", 1, str(tmp_path), 4)
    assert total / 4 < shard < 0.27 * total
    # Two threads with at most 12 MiB each, and what the interpreter takes.
    assert shard * 0.9 < peak < shard + (64 << 20) < total / 2, (shard, peak, total)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: family_model("mixtral"), id="matrices of experts"),
    pytest.param(lambda: derived_model("GPTNeoX", {}), id="head"),
    pytest.param(lambda: derived_model("GraniteMoe", LOCAL_EXPERTS), id="experts and router"),
])
def test_names_that_transformers_converts(make: Any, tmp_path: Path) -> None:
    whole = make()
    whole.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not {*file.keys()} <= {name for name, _ in whole.named_parameters()}
    for rank in range(2):
        part = load(str(tmp_path), ParallelGroup(rank, 2), device="cpu", check_class=lambda model: None)
        for name, parameter in part.named_parameters():
            owner, _, key = name.rpartition(".")
            expected = shard_of(part.get_submodule(owner), key).take(whole.get_parameter(name).data)
            assert torch.equal(parameter, expected), name
