"""`PagedConfig`: all settings of an engine in one frozen object."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hf_paged.vllm_names import LOADING, unknown_names

ATTENTION_BACKENDS = ("auto", "triton", "hopper", "flash_attn", "torch")
ALL_REDUCES = ("auto", "nccl", "peers")
ON_WEIGHT_CHANGE = ("recompute", "keep")
DEQUANTIZE = (True, False, "auto")
WARMUPS = (True, False, "full")
OF_EXECUTOR = ("merge_weights", "fused_kernels", "one_launch", "fused_experts", "dequantize",
               "routed_experts")  # how it computes
# Arguments of `PagedGenerator.from_pretrained` that are no fields of PagedConfig: they say how a model is loaded.
OF_LOADING = ("tensor_parallel_size", "dtype", "device", "device_map", "tokenizer", "trust_remote_code", "revision",
              "token", "cache_dir", "attn_implementation", "quantization_config")

T = TypeVar("T")


def _refusing_unknown_fields(config: type[T]) -> type[T]:
    """Make a config's constructor raise an error that says what to write in place of an unknown name."""
    stock = config.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        check_fields(given)
        stock(self, *args, **given)

    config.__init__ = __init__  # type: ignore[method-assign]
    return config


@_refusing_unknown_fields
@dataclass(frozen=True)
class PagedConfig:
    """Settings of a paged engine. Immutable; `hf_paged.enable(model, config, **overrides)` replaces single fields.

    Attributes:
        block_size: tokens that a KV block holds; a power of two, at least 16.
        num_blocks: blocks in the KV pool, the null block counted. None: `PagedGenerator` allocates the memory budget;
            an enabled model's pool starts small and grows on demand up to the budget.
        gpu_memory_utilization: share of the GPU's memory, in (0, 1], that all programs on the GPU may use together.
        max_num_seqs: sequences that run at the same time; further sequences wait.
        max_num_batched_tokens: tokens that a step computes at most; longer prompts are computed in chunks.
        max_model_len: longest sequence in tokens, prompt and output. None: the number of positions of the model, with
            YaRN its factor times the original number. A longer limit computes what stock computes at such positions;
            where RoPE frequencies depend on the longest sequence of a batch (dynamic, longrope) the limit may not
            exceed the length from which they do.
        enable_prefix_caching: keep full blocks of finished requests, and share equal prefixes.
        group_prefixes: let decode rows, and new prompts, whose block tables begin with the same blocks read these
            blocks once, where that is faster. False: each row reads its blocks by itself, as on a CPU always.
        enforce_eager: never capture CUDA graphs.
        attention_backend: one of "auto", "triton", "hopper", "flash_attn", "torch". "hopper" runs prompts by a kernel
            for H100 and H200, "flash_attn" by an installed flash-attn 2 or 3, other rows by "triton"; an error if
            the backend cannot be used. "torch" waits for the device in every step, so it runs without CUDA graphs.
        strict: raise `FallbackError` where a call would go to stock `generate`.
        seed: base seed of calls that bring none. None: drawn from torch's default generator for each call.
        merge_weights: on a GPU lay q, k, v (and gate, up) side by side in memory, each still a parameter of its own
            with an ordinary storage. On a CPU nothing is merged.
        fused_kernels: norms, RoPE, activation, states, products of few rows by hf_paged's kernels; False: torch's.
        one_launch: on H100 and H200 compute all layers of a step of up to eight sequences in one launch, where its
            kernel supports the model: dense Qwen3 and Llama models in bf16 with heads of 128 and merged weights,
            without LoRA. Until the kernel is compiled, and to the end of the requests that run then, steps run layer
            by layer, with other rounding: a first run may choose other tokens than later runs. False: layer by layer.
        fused_experts: on NVIDIA GPUs experts by hf_paged's kernels (known blocks in bf16 or fp16);
            False: by transformers' modules.
        dequantize: copies of 4-bit weights of bitsandbytes (`Linear4bit`, as in QLoRA) in the dtype the layers compute
            in, for Qwen3 and Llama models: "auto": where they take at most half of the free memory; True: always, an
            error if memory is short; False: none. Without copies, kernels read the 4-bit weights on a GPU.
        routed_experts: report the experts that each token took (`Completion.routed_experts`), which lie beside its keys
            and values. An error for a model without routers, with recurrent states or over several ranks.
        all_reduce: how several GPUs sum their partial results: "nccl"; "peers": by kernels that reach the other GPUs'
            memory over NVLink, an error if the kernels cannot; "auto": by these kernels where they work and are
            faster. Without effect for a model on one device.
        on_weight_change: what happens to running requests when the model is found to have changed: "recompute": the
            keys and values of all their tokens are computed again; "keep": their keys and values stay, and later
            tokens are computed over them with the new weights. Tokens made so far stay in either case.
        gather_timeout: seconds that a rank of a model sharded by FSDP2 waits in `generate` for the other ranks to call
            `generate`, too, before it raises.
        speculation: let requests with ``prompt_lookup_num_tokens`` guess tokens by looking earlier tokens up. False:
            no guesses. The tokens are the same.
        structured_max_seconds: seconds that a form of outputs (`structured`) may take to compile in a process of its
            own; waiting for such a process does not count. A form that takes longer is refused.
        structured_max_bytes: size of a form's text, UTF-8 (a schema as JSON, a list of choices as JSON). A larger one
            is refused.
        warmup: what an engine does on a GPU before its first request. False: nothing. True: load the kernels that
            earlier processes of this model and config needed. "full": also compile the kernels of steps of all sizes
            and of options that clients of an OpenAI API send, and capture the graphs of decode steps and of steps that
            earlier processes repeated.
        overlap: schedule step n + 1 while step n runs. None: True on CUDA, False on a CPU (where it gains nothing).

    Raises:
        ValueError: for a value outside these limits; the message names the field, the value and what is accepted.
        TypeError: for a name that is no field; the message says what to write, also for names of vLLM.
    """

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    group_prefixes: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    strict: bool = False
    seed: int | None = None
    merge_weights: bool = True
    fused_kernels: bool = True
    one_launch: bool = True
    fused_experts: bool = True
    dequantize: bool | str = "auto"
    routed_experts: bool = False
    all_reduce: str = "auto"
    on_weight_change: str = "recompute"
    gather_timeout: float = 600.0
    speculation: bool = True
    structured_max_seconds: float = 10.0
    structured_max_bytes: int = 1 << 18
    warmup: bool | str = True
    overlap: bool | None = None

    def __post_init__(self) -> None:
        require_int("block_size", self.block_size, 16)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size!r}: expected a power of two, at least 16")
        require_int("max_num_seqs", self.max_num_seqs, 1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens!r}: expected at least {self.max_num_seqs}, which "
                "is max_num_seqs: every running sequence decodes in every step"
            )
        require_int("num_blocks", self.num_blocks, 2, optional=True)
        require_int("max_model_len", self.max_model_len, 1, optional=True)
        require_int("seed", self.seed, 0, optional=True)
        if self.seed is not None and self.seed >= 2**63:
            raise ValueError(f"seed={self.seed!r}: expected None or an integer in [0, 2**63)")
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization={share!r}: expected a number in (0, 1]")
        _require_one_of(self, "attention_backend", ATTENTION_BACKENDS)
        for name in ("enable_prefix_caching", "group_prefixes", "enforce_eager", "strict", "merge_weights",
                     "fused_kernels", "one_launch", "fused_experts", "routed_experts", "speculation"):
            _require_one_of(self, name, (True, False))
        _require_one_of(self, "dequantize", DEQUANTIZE)
        _require_one_of(self, "all_reduce", ALL_REDUCES)
        _require_one_of(self, "on_weight_change", ON_WEIGHT_CHANGE)
        require_int("structured_max_bytes", self.structured_max_bytes, 1)
        for name in ("gather_timeout", "structured_max_seconds"):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0.0 < seconds < float("inf"):
                raise ValueError(f"{name}={seconds!r}: expected a positive number of seconds")
        _require_one_of(self, "warmup", WARMUPS)
        _require_one_of(self, "overlap", (None, True, False))


def check_fields(given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that are no fields of a `PagedConfig`; the message says what to write."""
    known = {field.name for field in fields(PagedConfig)}
    if unknown := {name: value for name, value in given.items() if name not in known}:
        from transformers import GenerationConfig  # only here: the command line's parser imports this file

        elsewhere = {"PagedGenerator.from_pretrained, which loads the model": OF_LOADING,
                     "PagedGenerator.generate or model.generate": vars(GenerationConfig())}
        raise TypeError(unknown_names(unknown, known, LOADING, elsewhere, "expected a field of PagedConfig"))


def read_pairs(given: Iterable[str]) -> dict[str, Any]:
    """Parse NAME=VALUE arguments of a command line: values are JSON, Python's True, False and None, or else text.

    Raises:
        ValueError: for an argument without a name.
    """
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{one!r}: expected NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def require_int(name: str, value: object, least: int, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an integer of at least `least` (or None, if `optional`)."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected {'None or ' if optional else ''}an integer of at least {least}")


def _require_one_of(config: PagedConfig, name: str, accepted: tuple) -> None:
    value = getattr(config, name)
    if not any(value is a or (isinstance(a, str) and value == a) for a in accepted):
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, accepted))}")


def executor_options(config: PagedConfig) -> dict[str, Any]:
    """Return the options of a model's executor by name."""
    return {name: getattr(config, name) for name in OF_EXECUTOR}
