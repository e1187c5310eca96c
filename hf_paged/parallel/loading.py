"""Loading of one rank's part of a checkpoint as a model on its device; the rest of the weights is never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_paged.parallel.checkpoint import DTYPES, CheckpointSlice, Entry, catalogue, find_files, read, same
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.named_weights import NamedWeights, ShardRange, WeightLocation
from hf_paged.parallel.plan import parallelize


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' AutoModelForCausalLM; for a config that only image-text classes have, their auto class."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    is_image_text = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if is_image_text and not is_causal else AutoModelForCausalLM


def load(path_or_id: str, group: ParallelGroup, *, dtype: str | torch.dtype | None = "auto",
         device: str | torch.device, check: Callable[[], None] = lambda: None, files: dict[str, Any] | None = None,
         check_class: Callable[[PreTrainedModel], None] = lambda model: None) -> PreTrainedModel:
    """Build a causal LM of which this rank holds its part, in eval mode, and read that part from safetensors.

    Args:
        path_or_id: directory of a checkpoint, or its id on the hub.
        group: the ranks that hold the model together. Nothing is communicated: they need not have met.
        dtype: dtype of the weights; "auto" or None: the config's, or else that of the checkpoint's first tensor.
        device: device of the weights.
        check: called several times a second; when it raises, loading ends with its error.
        files: arguments of transformers' `from_pretrained` for finding files: revision, token, ...
        check_class: called with the rank's part before weights are read; raises UnsupportedModelError if the forward of
            its class may compute something else over ranks.

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
        model = auto_class(config).from_config(config, dtype=_dtype(dtype, config, entries))
    parallelize(model, group)
    check_class(model)
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
    weights, prefix = NamedWeights(model), f"{model.base_model_prefix}."
    covered: dict[ShardRange, str] = {}  # a key of each
    by_matrix: dict[str, bool] = {}  # of tensors: whether experts' matrices come one by one
    slices: list[CheckpointSlice] = []
    tied: list[CheckpointSlice] = []
    for key, entry in entries.items():
        if weights.is_ignored(key):
            continue
        try:
            place = weights.place(key)
        except ValueError as error:
            raise ValueError(f"{key} in {entry.file} is no parameter of the model: expected a checkpoint of its "
                             "config's architecture") from error
        if entry.shape != place.shard.shape:
            raise ValueError(f"{key} in {entry.file} has shape {entry.shape}: expected {place.shard.shape}")
        alone, twin = place.covers.expert is not None, covered.setdefault(place.covers, key)
        is_tied = twin.removeprefix(prefix) != key.removeprefix(prefix)
        if by_matrix.setdefault(place.covers.name, alone) != alone or (twin is not key and not is_tied):
            raise ValueError(f"{key} in {entry.file} is there in two forms: expected a checkpoint that has each weight "
                             "once")
        (tied if is_tied else slices).extend(_slices(key, place))
    for name in weights.missing(covered):
        files = sorted({entry.file for entry in entries.values()})
        raise ValueError(f"{path}: {name} is missing: expected it with shape {weights.shape(name)} in "
                         f"{', '.join(files)}")
    check()
    read(slices, entries, check)
    if not same(tied, entries):
        raise ValueError(f"{path}: lm_head.weight is not the embedding, which tie_word_embeddings=True says: expected "
                         "tie_word_embeddings=False in its config")


def _slices(key: str, place: WeightLocation) -> Iterator[CheckpointSlice]:
    """Yield the slices of a checkpoint's tensor for its place, whose padding is zeroed here."""
    shard, data = place.shard, place.data
    if shard.padding:
        data.narrow(shard.dim, data.shape[shard.dim] - shard.padding, shard.padding).zero_()
    for own, start, size in shard.spans():
        part = data.narrow(shard.dim, own, size)
        if part.ndim < 3:
            yield CheckpointSlice(key, shard.dim, start, start + size, part)
            continue
        for index, matrix in enumerate(part):
            if shard.dim:  # within the matrix of each expert
                yield CheckpointSlice(key, shard.dim - 1, start, start + size, matrix, index)
            else:
                yield CheckpointSlice(key, 0, 0, len(matrix), matrix, start + index)


def _generation_config(path_or_id: str, files: dict[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path_or_id, **files)
    except OSError:  # there is no such file: as in from_pretrained
        return GenerationConfig.from_pretrained(path_or_id, config_file_name="config.json", _from_model_config=True,
                                                **files)
