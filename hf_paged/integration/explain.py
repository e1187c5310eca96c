"""Paths of calls that do not run: `hf_paged.explain` of a model, and a preview of a checkpoint from its config alone.

The path of a call is found by stock's preparation of it, without decoding.
"""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_paged.attention import flash_attn_backend
from hf_paged.attention.registry import resolve_backend
from hf_paged.config import executor_options
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration.enable import as_if_enabled, innermost, merged_config, unsupported_class
from hf_paged.integration.enabled import ENGINES
from hf_paged.integration.fallback import IN_FALLBACK
from hf_paged.integration.paths import ASKED, Question, within
from hf_paged.models import find_executor
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.models.fused import FusedExecutor
from hf_paged.outputs import Explanation
from hf_paged.parallel.checkpoint import check_place, find_files, naming_broken_files, naming_the_place
from hf_paged.parallel.loading import auto_class
from hf_paged.process_lock import ProcessLock
from hf_paged.runner.memory import MemoryPlan, planned

_one_at_a_time = ProcessLock()  # filters of warnings are the process' own
_GIB = 2**30


class _SilentStreamer:
    """Streamer without effect: stock streams the prompt before it decodes, and a `generate` of the model's own may
    stream all."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def explain(model: nn.Module, **generate_kwargs: Any) -> Explanation:
    """Return the path, reasons and remedies of ``model.generate(**generate_kwargs)`` without running it.

    The model may be enabled or not (then the result is that after `enable(model)`). It is not changed; no cache is
    allocated, no random number drawn, no warning given. A `PagedGenerator` whose memory was released gets its KV pool
    back.

    Args:
        model: As for `enable`.
        **generate_kwargs: Arguments of the call. Without `inputs`, `input_ids` and `inputs_embeds` the prompt is one
            token, or one for each of `adapter_names`; a longer one, or padding, may lead to another path.

    Returns:
        The path, and each reason with its remedy.

    Raises:
        UnsupportedModelError (a TypeError): If there is no transformers model inside.
        Exception: Errors that `generate` raises about its arguments before it decodes.
    """
    causal_lm = innermost(model)
    if not isinstance(causal_lm, PreTrainedModel):
        raise UnsupportedModelError(f"model={type(model).__name__}: expected a transformers model, bare or wrapped")
    if causal_lm not in ENGINES and (reason := unsupported_class(causal_lm, anew=True)) is not None:
        return _explanation("stock", reason)
    if generate_kwargs.get("streamer") is not None:
        generate_kwargs["streamer"] = _SilentStreamer()
    if generate_kwargs.keys().isdisjoint(("inputs", "input_ids", "inputs_embeds")):
        names = generate_kwargs.get("adapter_names")  # of PEFT's `generate`: one per row
        rows = max(1, len(names)) if isinstance(names, (list, tuple)) else 1
        generate_kwargs["input_ids"] = ids = torch.zeros((rows, 1), dtype=torch.int64, device=causal_lm.device)
        generate_kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with _one_at_a_time.rlock, as_if_enabled(causal_lm) as engine:
        question = Question(engine)
        caller: Any = model if hasattr(model, "generate") else causal_lm
        with within(ASKED, question), within(IN_FALLBACK, ()), _quiet():
            caller.generate(**generate_kwargs)
    if question.answer is not None:
        return _explanation(question.answer.path, *question.answer.reasons)
    reason = Reason(f"the generate of {type(causal_lm).__name__} does not come to stock's decoding",
                    remedy="Call `GenerationMixin.generate`, or use a class that does not override it.")
    return _explanation("stock", reason)


def _explanation(path: str, *reasons: Reason) -> Explanation:
    by_kind = {reason.kind: reason for reason in reversed(reasons)}  # the first reason of each kind
    distinct = tuple(by_kind.pop(reason.kind) for reason in reasons if reason.kind in by_kind)
    return Explanation(path, distinct, tuple(reason.remedy for reason in distinct))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log messages of stock's preparation, which the real call will show."""
    names = [name for name in logging.Logger.manager.loggerDict if name.startswith("transformers.generation")]
    loggers = list(map(logging.getLogger, names))
    for logger in loggers:
        logger.addFilter(_not_asked)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_not_asked)


def _not_asked(record: logging.LogRecord) -> bool:
    return ASKED.get() is None  # in this thread


@dataclass(frozen=True)
class Preview:
    """Preview of a model on this machine."""

    model_class: str  # that transformers makes from the config
    num_parameters: int  # tied ones count once
    dtype: str
    device: str
    is_loaded: bool  # the weights were read
    layers: str  # "fused" (hf_paged's kernels), "generic" (transformers' modules around paged attention) or "stock"
    proof: str | None  # up to where a model that is not fused is proved to compute stock's numbers
    attention: str | None  # the backend that ``attention_backend`` selects on the device; None for a stock model
    other_attention: str | None  # why FlashAttention does not run the prompts, for each package; None if it does
    quantized: str | None = None  # how 4-bit layers of a fused model run, and why; None if there are none
    experts: str | None = None  # why transformers' modules compute experts; None if kernels do
    states: str | None = None  # the same of layers with a recurrent state in decode steps
    calls: dict[str, Explanation] = field(default_factory=dict)  # results of `hf_paged.explain` by name
    memory: MemoryPlan | None = None  # None for a stock model

    def __str__(self) -> str:
        loaded = "weights loaded" if self.is_loaded else "weights not read"
        how = {"fused": "fused: hf_paged's kernels", "generic": "generic: transformers' modules around paged attention",
               "stock": "stock: transformers alone"}
        lines = [
            f"model      {self.model_class}, {self.num_parameters / 1e6:,.1f} million parameters in {self.dtype}, "
            f"{loaded}", f"layers     {how[self.layers]}",
        ]
        own = "by transformers' modules: "
        others = (("4 bit", "", self.quantized), ("experts", own, self.experts), ("states", own, self.states),
                  ("proof", "", self.proof))
        lines += [f"{name:10} {how}{text}" for name, how, text in others if text is not None]
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
    config = merged_config(None, overrides or {})
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_place("model", path_or_id, ("config.json",))
    with naming_the_place("model", path_or_id), naming_broken_files(lambda: find_files(path_or_id)):
        model = model_of_config(path_or_id, dtype, load, trust_remote_code)
    is_loaded = load or getattr(model.config, "quantization_config", None) is not None
    explained = {name: explain(model, **arguments) for name, arguments in calls.items()}
    make = find_executor(model)
    layers, quantized, experts, states, proof, attention, other, memory = "stock", *[None] * 7
    if make is not None and unsupported_class(model) is None:
        executor = make(model, **executor_options(config))
        layers, experts = "fused" if isinstance(executor, FusedExecutor) else "generic", executor.why_not_experts(place)
        if isinstance(executor, FusedExecutor):
            quantized = executor.describe_4bit(place)
        if isinstance(executor, RecurrentExecutor):
            states = executor.why_not_kernels(place)
        if isinstance(executor, DerivedExecutor):
            proof = (f"stock's numbers in sequences of up to {executor.max_length():,} tokens and steps of up to "
                     f"{executor.max_step_tokens:,}")
        attention = resolve_backend(config.attention_backend, place).name
        if attention != "flash_attn" and place.type == "cuda":
            spec = executor.kv_spec().attention(config.block_size)._replace(device=place)
            usable = "an installed package could: attention_backend='flash_attn' takes it"
            other = flash_attn_backend.missing(spec) or usable
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        memory = planned(executor, config, place, sum(tensor.nbytes for tensor in tensors.values()))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"the CPU ({platform.machine()})"
    return Preview(type(model).__name__, model.num_parameters(), str(model.dtype).removeprefix("torch."), name,
                   is_loaded, layers, proof, attention, other, quantized, experts, states, explained,
                   memory)


def model_of_config(path_or_id: str, dtype: str, load: bool, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a config on the CPU; without ``load``, with weights whose memory is never touched.

    Raises:
        OSError, ValueError: as `preview`.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype={dtype!r}: expected 'auto' or a dtype of torch, as bfloat16")
    config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
    if load or getattr(config, "quantization_config", None) is not None:
        model = auto_class(config).from_pretrained(path_or_id, dtype=dtype, trust_remote_code=trust_remote_code)
        return model.eval()
    chosen = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with no_init_weights():  # so that the weights' pages are never touched and take no memory
        model = auto_class(config).from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    model.tie_weights()  # as for a checkpoint; without initialisation transformers does not tie them
    with suppress(OSError):  # without this file transformers, too, derives one from the config
        model.generation_config = GenerationConfig.from_pretrained(path_or_id)
    return model.eval()


def _memory_lines(memory: MemoryPlan, device: str) -> list[str]:
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
