"""Loading of one rank's part of a checkpoint as a model on its device; the rest of the weights is never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_paged.parallel.checkpoint import DTYPES, CheckpointSlice, Entry, catalogue, find_files, read, same
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import ShardedExperts, shard_of
from hf_paged.parallel.named_weights import ignored_keys
from hf_paged.parallel.plan import parallelize
from hf_paged.parallel.shards import Shard

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(path_or_id: str, group: ParallelGroup, *, dtype: str | torch.dtype | None = "auto",
         device: str | torch.device, check: Callable[[], None] = lambda: None,
         files: dict[str, Any] | None = None) -> PreTrainedModel:
    """Build a causal LM of which this rank holds its part, in eval mode, and read that part from safetensors.

    Args:
        path_or_id: directory of a checkpoint, or its id on the hub.
        group: the ranks that hold the model together. Nothing is communicated: they need not have met.
        dtype: dtype of the weights; "auto" or None: the config's, or else that of the checkpoint's first tensor.
        device: device of the weights.
        check: called several times a second; when it raises, loading ends with its error.
        files: arguments of transformers' `from_pretrained` for finding files: revision, token, ...

    Raises:
        UnsupportedModelError: the model cannot be sharded.
        FileNotFoundError: no safetensors files, or some are missing.
        ValueError: for a wrong `dtype`; a quantized checkpoint; a key that is missing, left over, or of another shape
            or dtype than the model's. The message names the key and the file.
    """
    path_or_id, device, files = str(path_or_id), torch.device(device), files or {}
    config = AutoConfig.from_pretrained(path_or_id, **files)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{path_or_id} is quantized ({config.quantization_config}): expected float weights")
    entries = catalogue(find_files(path_or_id, **files))
    if unknown := next((key for key, entry in entries.items() if entry.dtype not in DTYPES), None):
        raise ValueError(f"{unknown} in {entries[unknown].file} is {entries[unknown].dtype}: expected {list(DTYPES)}")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype, config, entries))
    parallelize(model, group)
    _allocate(model, device)
    _fill(model, path_or_id, entries, check)
    model.generation_config = _generation_config(path_or_id, files)
    return model.eval()


def _dtype(dtype: Any, config: Any, entries: dict[str, Entry]) -> torch.dtype:
    found = dtype
    if dtype in ("auto", None):
        found = config.dtype or DTYPES[next(iter(entries.values())).dtype]
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if found not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r}: expected 'auto', or one of {[str(d) for d in DTYPES.values()]}")
    return found


def _allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate every parameter on the device, once if two modules share it, and move the buffers there."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                memory = torch.empty_like(parameter.data, device=device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _fill(model: PreTrainedModel, path: str, entries: dict[str, Entry], check: Callable[[], None]) -> None:
    keys = _Keys(model, path, entries)
    pieces: list[CheckpointSlice] = []
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{module_name}.{name}"
            if key == HEAD and model.config.tie_word_embeddings:
                continue
            pieces += _pieces(keys, module, key, shard_of(module, name), parameter.data)
    tied = []
    if model.config.tie_word_embeddings and keys.has(HEAD) and keys.has(EMBEDDING):
        tied = _pieces(keys, model.lm_head, HEAD, shard_of(model.lm_head, "weight"), model.lm_head.weight.data)
    keys.check_all_used()
    check()
    read(pieces, entries, check)
    if not same(tied, entries):
        raise ValueError(f"{path}: {HEAD} is not the embedding, which tie_word_embeddings=True says: expected "
                         "tie_word_embeddings=False in its config")


class _Keys:
    """Map from names of a model's parameters to keys of a checkpoint, of the causal LM or of its decoder only."""

    def __init__(self, model: PreTrainedModel, path: str, entries: dict[str, Entry]) -> None:
        self._path, self._entries = path, entries
        self._prefix = f"{model.base_model_prefix}."
        self._has_prefix = any(key.startswith(self._prefix) for key in entries)
        self._used: set[str] = set()
        self._ignored = ignored_keys(model)
        self._tied = bool(model.config.tie_word_embeddings)

    def has(self, name: str) -> bool:
        return self._key(name) in self._entries

    def use(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter; ValueError if it is missing or has another shape."""
        if self._tied and name == EMBEDDING and not self.has(name):
            name = HEAD
        key = self._key(name)
        if (entry := self._entries.get(key)) is None:
            files = sorted({entry.file for entry in self._entries.values()})
            raise ValueError(f"{self._path}: {key} is missing: expected it with shape {shape} in {', '.join(files)}")
        if entry.shape != shape:
            raise ValueError(f"{key} in {entry.file} has shape {entry.shape}: expected {shape}")
        self._used.add(key)
        return key

    def check_all_used(self) -> None:
        for key, entry in self._entries.items():
            if key not in self._used and not any(pattern.search(key) for pattern in self._ignored):
                raise ValueError(f"{key} in {entry.file} is no parameter of the model: expected a checkpoint of its "
                                 "config's architecture")

    def _key(self, name: str) -> str:
        return name if self._has_prefix else name.removeprefix(self._prefix)


def _pieces(keys: _Keys, module: nn.Module, name: str, shard: Shard, data: torch.Tensor) -> list[CheckpointSlice]:
    """Return the pieces to read for one parameter, whose padding is zeroed here."""
    if shard.padding:
        data.narrow(shard.dim, data.shape[shard.dim] - shard.padding, shard.padding).zero_()
    if data.ndim < 3:
        key = keys.use(name, shard.shape)
        return [CheckpointSlice(key, shard.dim, start, stop, target)
                for start, stop, target in _targets(shard, data, shard.dim)]
    if keys.has(name) or not isinstance(module, ShardedExperts):
        key = keys.use(name, shard.shape)
        return [
            CheckpointSlice(key, shard.dim - 1, start, stop, target, index)
            for index in range(len(data))
            for start, stop, target in _targets(shard, data[index], shard.dim - 1)
        ]
    return list(_pieces_by_expert(keys, name, shard, data))


def _targets(shard: Shard, data: torch.Tensor, dim: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    offset = 0
    for start, stop in shard.ranges:
        yield start, stop, data.narrow(dim, offset, stop - start)
        offset += stop - start


def _pieces_by_expert(keys: _Keys, name: str, shard: Shard, data: torch.Tensor) -> Iterator[CheckpointSlice]:
    """Yield pieces of a checkpoint with gate, up and down matrices per expert; gate and up are one model parameter."""
    experts, _, fused = name.rpartition(".")
    _, height, width = shard.shape
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
    height //= len(names)
    for index in range(len(data)):
        for part, (start, stop, target) in enumerate(_targets(shard, data[index], shard.dim - 1)):
            key = keys.use(f"{experts}.{index}.{names[part]}.weight", (height, width))
            offset = part * height
            yield CheckpointSlice(key, shard.dim - 1, start - offset, stop - offset, target)


def _generation_config(path_or_id: str, files: dict[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path_or_id, **files)
    except OSError:  # there is no such file: as in from_pretrained
        return GenerationConfig.from_pretrained(path_or_id, config_file_name="config.json", _from_model_config=True,
                                                **files)
