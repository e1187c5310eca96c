"""Layout of a model of some class and config, read off one forward on the meta device, and contents of its modules.

Contents are what modules hold besides the numbers of their tensors, as values that JSON holds and that compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.guards.origin import package_of
from hf_paged.guards.snapshot import KEPT_BY_GENERATE
from hf_paged.models.base import AttentionMask, StateShape
from hf_paged.models.derivation.executor import AttentionLayout, modules_below
from hf_paged.models.proof.calls import AttentionRecord
from hf_paged.models.proof.checks.flash import check_flash
from hf_paged.models.proof.clone import on_meta
from hf_paged.models.proof.outline import outline_of
from hf_paged.models.proof.store import values_of
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.rope import longest_length
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import Sharded
from hf_paged.parallel.plan import cut

MOST_HEAD_DIM = 512
NO_POSITIONS = 1 << 20  # tokens of a sequence whose model has no positions: as many as proofs look at
# Where a model comes from, how it is trained, which row of an embedding gets no gradient, a number of tokens that
# `resize_token_embeddings` leaves as it was, and forwards, which eligibility looks at.
_NOT_READ = frozenset({"name_or_path", "warnings_issued", "generation_config", "model_tags", "training",
                       "gradient_checkpointing", "padding_idx", "vocab_size", "forward", KEPT_BY_GENERATE})
# Ends of names of what a forward beyond the original length leaves in a rotary module, and a shorter one sets anew.
_LEFT_BEHIND = ("max_seq_len_cached", "long_inv_freq")
# What tells the ranks apart that hold a layer's parts.
_OF_RANK = frozenset({"group", "shards", "first", "num_real"})
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layout:
    """What a model of some class and config is made of, without its weights.

    ``contents``: of each module by path, what `contents_of` says. ``has_stock_cache``: as of `ModelExecutor`.
    ``ignores_train_mode``: whether the class computes the same in train mode, but for what layers in it do.
    """

    body: str
    calls: tuple[AttentionLayout, ...]
    classes: dict[str, type]
    contents: dict[str, Any]
    num_logits: int
    positions: int
    longest: int  # tokens of a sequence that the config has frequencies for, beyond its positions
    has_stock_cache: bool = True
    ignores_train_mode: bool = False
    states: tuple[StateShape, ...] = ()


def lay_out(cls: type[PreTrainedModel], config: PreTrainedConfig, num_ranks: int = 1,
            dtype: torch.dtype = torch.float32, *, by_windows: bool = False) -> Layout:
    """Return the layout of models of this class and config, whose weights have a dtype, or of one rank's part of them;
    may raise `Refused`.

    ``by_windows``: their attention implementation takes windows from modules, not from masks, as FlashAttention does.
    """
    model = on_meta(cls, config).to(dtype)  # type: ignore[arg-type]
    classes, group = _classes_in(model), ParallelGroup(0, num_ranks)
    if odd := next((path for path, kind in classes.items() if package_of(kind) not in ("torch", "transformers")), None):
        raise Refused(f"{odd} is a {classes[odd].__name__}, no class of torch or transformers")
    if group.is_parallel:
        cut(model, group)
        classes = _classes_in(model)
    contents = contents_of(model)
    with watched_forwards(model) as seen, group.alone(lambda: None):
        shown = outline_of(model)
    calls = shown.calls
    if (limit := positions_of(model.config) if calls else NO_POSITIONS) is None:
        raise Refused("its config names no number of positions")
    check_pages(calls)
    longest = longest_length(model.config.get_text_config(decoder=True), NO_POSITIONS) if calls else NO_POSITIONS
    body = body_of(seen.entered, [call.module for call in calls])
    if by_windows:
        check_flash(model, body, calls)
    return Layout(body, tuple(map(_layout_of, calls)), classes, contents, seen.num_logits, limit, longest,
                  states=shown.states)


def _classes_in(model: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in model.named_modules() if path}


class Forwards:
    """Paths of modules in the order in which a forward entered them, and the number of its logits."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.num_logits = 0


@contextmanager
def watched_forwards(model: nn.Module) -> Iterator[Forwards]:
    """Note what forwards of a model enter in a ``with`` block."""
    seen, paths = Forwards(), {id(module): path for path, module in model.named_modules()}

    def on_end(module: nn.Module, args: Any, output: Any) -> None:
        seen.num_logits = output.logits.shape[-1]

    hooks = [module.register_forward_pre_hook(lambda module, args: seen.entered.append(paths[id(module)]))
             for module in model.modules()]
    hooks.append(model.register_forward_hook(on_end))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def body_of(entered: list[str], attending: list[str]) -> str:
    """Return the path of the outermost module that was entered, below the model, around all that attend."""
    for path in filter(None, entered):
        if all(module.startswith(f"{path}.") for module in attending):
            return path
    raise Refused("no module below the model makes all of its attention calls")


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the length of the longest sequence that a config has positions for, or None."""
    text = config.get_text_config(decoder=True)
    return longest_length(text, None) if isinstance(getattr(text, "max_position_embeddings", None), int) else None


def _layout_of(call: AttentionRecord) -> AttentionLayout:
    window, chunk = (call.mask.size if call.mask.name == name else None for name in ("sliding", "chunked"))
    mask = AttentionMask(window, chunk)
    return AttentionLayout(call.module, call.query_heads, call.key_heads, call.key_size, call.value_size, mask)


def check_pages(calls: tuple[AttentionRecord, ...]) -> None:
    """Raise `Refused` for calls whose keys and values pages, or kernels that read them, do not hold."""
    for call in calls:
        if (size := max(call.key_size, call.value_size)) > MOST_HEAD_DIM:
            raise Refused(f"{call.module} has heads of {size} numbers, and kernels of GPUs take "
                          f"{MOST_HEAD_DIM} at most")
    modules = [call.module for call in calls]
    if twice := next((module for module in modules if modules.count(module) > 1), None):
        raise Refused(f"{twice} attends more than once in a forward, and caches of results hold one layer for each")


def contents_of(model: nn.Module) -> dict[str, Any]:
    """Return what each module below a model holds by name, by the module's path: values, and shapes of tensors."""
    digests: dict[int, str] = {}

    def digest(config: PreTrainedConfig) -> str:
        if id(config) not in digests:
            digests[id(config)] = hashlib.sha256(values_of(config).encode()).hexdigest()[:16]
        return digests[id(config)]

    return {path: _of_module(module, digest) for path, module in modules_below(model, ())}


def _of_module(module: nn.Module, digest: Callable[[PreTrainedConfig], str]) -> dict[str, Any]:
    not_read = _NOT_READ | _OF_RANK if isinstance(module, Sharded) else _NOT_READ
    held = {name: value for name, value in vars(module).items()
            if name[0] != "_" and name not in not_read and not name.endswith(_LEFT_BEHIND)}
    tensors = {name: value for name, value in {**held, **module._parameters, **module._buffers}.items()
               if isinstance(value, torch.Tensor)}
    return {name: _described(value, digest) for name, value in held.items() if name not in tensors} | {
        f"shape of {name}": list(tensor.shape) for name, tensor in tensors.items()}


def _described(value: Any, digest: Callable[[PreTrainedConfig], str]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, PreTrainedConfig):
        return digest(value)
    if isinstance(value, (list, tuple)):
        return [_described(one, digest) for one in value]
    if isinstance(value, dict):
        return {str(name): _described(one, digest) for name, one in value.items()}
    if isinstance(value, (torch.dtype, torch.Size)):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
