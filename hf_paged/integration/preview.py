"""Preview of a model on the paged engine from its config alone: paths of calls, attention, memory."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_paged.attention import flash_attn_backend
from hf_paged.attention.registry import resolve_backend
from hf_paged.config import PagedConfig
from hf_paged.integration.enable import merged_config, unsupported_class
from hf_paged.integration.explain import explain
from hf_paged.models import ModelExecutor, find_executor
from hf_paged.models.fused import FusedExecutor
from hf_paged.outputs import Explanation
from hf_paged.parallel.checkpoint import find_files
from hf_paged.parallel.checkpoint_place import check_place, naming_broken_files, naming_the_place
from hf_paged.runner.memory import planned

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Memory of the device, in bytes unless stated otherwise; None if it is not limited.

    Attributes:
        total, free: Memory of the device now.
        weights: Size of the loaded model.
        steps: Estimated working memory of steps and their graphs.
        kv_cache: Size of the pool.
        num_blocks, block_size: Number of blocks of the pool, and tokens per block.
        token: Size of one token's keys and values.
        max_model_len: Length of the longest sequence in tokens.
        num_longest: Number of sequences of that length that fit at once.
        fits: True if there are at least two blocks.
    """

    total: int | None
    free: int | None
    weights: int
    steps: int
    kv_cache: int
    num_blocks: int
    block_size: int
    token: int
    max_model_len: int
    num_longest: int
    fits: bool


@dataclass(frozen=True)
class Preview:
    """Preview of a model on this machine.

    Attributes:
        model_class: Name of the class that transformers makes from the config.
        num_parameters: Number of parameters; tied ones count once.
        dtype, device: Dtype and device of the weights.
        is_loaded: True if the weights were read.
        layers: "fused" (hf_paged's kernels), "generic" (transformers' modules around paged attention) or "stock".
        attention: Name of the backend that ``attention_backend`` selects on the device; None for a stock model.
        other_attention: Why FlashAttention does not run the prompts, for each package; None if it does.
        calls: Results of `hf_paged.explain` by name.
        memory: None for a stock model.
    """

    model_class: str
    num_parameters: int
    dtype: str
    device: str
    is_loaded: bool
    layers: str
    attention: str | None
    other_attention: str | None
    calls: dict[str, Explanation] = field(default_factory=dict)
    memory: Memory | None = None

    def __str__(self) -> str:
        """Format the preview for a terminal."""
        loaded = "weights loaded" if self.is_loaded else "weights not read"
        how = {"fused": "fused: hf_paged's kernels", "generic": "generic: transformers' modules around paged attention",
               "stock": "stock: transformers alone"}
        lines = [
            f"model      {self.model_class}, {self.num_parameters / 1e6:,.1f} million parameters in {self.dtype}, "
            f"{loaded}", f"layers     {how[self.layers]}",
        ]
        if self.attention is not None:
            lines.append(f"attention  {self.attention} on {self.device}")
        if self.other_attention is not None:
            lines += [f"           no FlashAttention: {part}" for part in self.other_attention.split("; ")]
        if self.memory is not None:
            lines += ["", *_memory_lines(self.memory, self.device)]
        width = max(map(len, self.calls), default=0)
        lines += ["", "calls of model.generate (native: on the engine; lockstep: stock's loop over the engine's "
                      "forwards; stock: transformers alone)"]
        for name, explanation in self.calls.items():
            lines.append(f"  {name:{width}}  {explanation.path}")
            for reason, remedy in zip(explanation.reasons, explanation.remedies, strict=True):
                lines += [f"  {'':{width}}    {reason}", f"  {'':{width}}      {remedy}"]
        return "\n".join(lines)


def preview(path_or_id: str, calls: dict[str, dict[str, Any]], *, dtype: str = "auto", device: str | None = None,
            load: bool = False, trust_remote_code: bool = False, overrides: dict[str, Any] | None = None) -> Preview:
    """Preview a checkpoint, or a folder with only its config.

    Args:
        path_or_id: As for transformers' `from_pretrained`.
        calls: Arguments of `model.generate` calls, by name.
        dtype: Dtype of the weights; "auto" for the config's.
        device: None for the current CUDA device, else the CPU. The model is always built on the CPU.
        load: Whether to read the weights; quantized weights are always read.
        overrides: Fields of `PagedConfig`.

    Raises:
        OSError: If transformers finds no config, or no weights to load.
        ValueError, TypeError: If an argument is invalid; the error names it.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype={dtype!r}: expected 'auto' or a dtype of torch, as bfloat16")
    config = merged_config(None, overrides or {})
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_place("model", path_or_id, ("config.json",))
    with naming_the_place("model", path_or_id), naming_broken_files(lambda: find_files(path_or_id)):
        model = _build(path_or_id, dtype, load, trust_remote_code)
    is_loaded = load or getattr(model.config, "quantization_config", None) is not None
    explained = {name: explain(model, **arguments) for name, arguments in calls.items()}
    make = find_executor(model)
    layers, attention, other, memory = "stock", None, None, None
    if make is not None and unsupported_class(model) is None:
        executor = make(model, merge_weights=config.merge_weights, fused_kernels=config.fused_kernels,
                        one_launch=config.one_launch)
        layers = "fused" if isinstance(executor, FusedExecutor) else "generic"
        attention, other = _attention(executor, config, place)
        memory = _memory(model, executor, config, place)
    return Preview(type(model).__name__, model.num_parameters(), str(model.dtype).removeprefix("torch."), _name(place),
                   is_loaded, layers, attention, other, explained, memory)


def _build(path_or_id: str, dtype: str, load: bool, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
    if load or getattr(config, "quantization_config", None) is not None:
        model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype, trust_remote_code=trust_remote_code)
        return model.eval()
    chosen = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with no_init_weights():  # so that the weights' pages are never touched and take no memory
        model = AutoModelForCausalLM.from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    model.tie_weights()  # as for a checkpoint; without initialisation transformers does not tie them
    with suppress(OSError):  # without this file transformers, too, derives one from the config
        model.generation_config = GenerationConfig.from_pretrained(path_or_id)
    return model.eval()


def _attention(executor: ModelExecutor, config: PagedConfig, device: torch.device) -> tuple[str, str | None]:
    backend = resolve_backend(config.attention_backend, device)
    if backend.name == "flash_attn" or device.type != "cuda":
        return backend.name, None
    spec = executor.kv_spec().attention(config.block_size)._replace(device=device)
    usable = "an installed package could: attention_backend='flash_attn' takes it"
    return backend.name, flash_attn_backend.missing(spec) or usable


def _memory(model: PreTrainedModel, executor: ModelExecutor, config: PagedConfig, device: torch.device) -> Memory:
    longest = executor.max_length(config.max_model_len)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    plan = planned(executor, config, longest, device, sum(tensor.nbytes for tensor in tensors.values()))
    block_bytes = executor.kv_spec().block_bytes(config.block_size)
    num_longest = (plan.num_blocks - 1) // -(-longest // config.block_size)
    return Memory(plan.total, plan.free, plan.weights, plan.steps, plan.num_blocks * block_bytes, plan.num_blocks,
                  config.block_size, block_bytes // config.block_size, longest, max(num_longest, 0),
                  plan.num_blocks >= 2)


def _memory_lines(memory: Memory, device: str) -> list[str]:
    lines = [f"memory of {device}" + ("" if memory.total is None or memory.free is None else
             f": {memory.total / _GIB:.1f} GiB, of which {memory.free / _GIB:.1f} are free")]
    lines.append(f"  weights  {memory.weights / _GIB:8.2f} GiB")
    lines.append(f"  steps    {memory.steps / _GIB:8.2f} GiB, an estimate")
    if not memory.fits:
        return [*lines, "  KV cache     nothing is left for it: the model does not fit"]
    tokens = (memory.num_blocks - 1) * memory.block_size
    lines.append(f"  KV cache {memory.kv_cache / _GIB:8.2f} GiB: {memory.num_blocks:,} blocks of {memory.block_size} "
                 f"tokens, {tokens:,} tokens of {memory.token / 1024:.1f} KiB")
    lines.append(f"  {memory.num_longest:,} sequences of {memory.max_model_len:,} tokens, the longest, fit at once")
    return lines


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU ({platform.machine()})"
