"""What a model's own code hands to its decoder, recorded without computing it, and exchanged in packed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.models.base import FedTokens
from hf_paged.models.executor import view_of
from hf_paged.models.images.fed_prompt import DEEPSTACK
from hf_paged.parallel.group import group_of
from hf_paged.parallel.layers import ShardedEmbedding

MASK = "visual_pos_masks"  # which tokens `DEEPSTACK` adds to, [B, T]


class _ReachedError(Exception):
    """Ends a forward where it calls the decoder."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


def decoder_below(model: nn.Module, body: str, attending: Sequence[str]) -> str | None:
    """Return the path of the innermost model around all modules that attend, if it lies below the module at `body`.

    The class's code between both looks at tokens and images; the decoder itself gets vectors.
    """
    path = attending[0] if attending else ""
    while path and not (isinstance(model.get_submodule(path), PreTrainedModel)
                        and all(other.startswith(f"{path}.") for other in attending)):
        path = path.rpartition(".")[0]
    return path if path.startswith(f"{body}.") else None


def handed_over(model: nn.Module, path: str, call: Callable[[Any], object]) -> dict[str, Any]:
    """Return the keyword arguments with which `call`, of a view of a model, calls the module at `path`.

    The model is not written to. Its other ranks take no part: where one of them has a token's vector, a vector of the
    largest number stands, which no image has. Raises LookupError if the call does not reach the module, and what `call`
    raises.
    """
    def reached(*args: Any, **inputs: Any) -> NoReturn:
        if args:
            raise LookupError(f"{path} is called with {len(args)} arguments without names")
        raise _ReachedError(inputs)

    forwards: dict[str, Callable[..., Any]] = {path: reached}
    if group_of(model).is_parallel:
        forwards |= {name: _alone(module) for name, module in model.named_modules()
                     if isinstance(module, ShardedEmbedding)}
    try:
        call(view_of(model, forwards))
    except _ReachedError as end:
        return end.inputs
    raise LookupError(f"the forward does not call {path}")


def _alone(embedding: ShardedEmbedding) -> Callable[[torch.Tensor], torch.Tensor]:
    weight: Any = embedding.weight  # type: ignore[attr-defined]
    return partial(embedding.own_vectors, others=torch.finfo(weight.dtype).max)


def feeding(body: nn.Module, path: str, fed: FedTokens) -> nn.Module:
    """Return a view of a model's body whose decoder, at `path` in it, is fed these rows and positions of a step."""
    decoder = body.get_submodule(path)
    return view_of(body, {path: lambda **inputs: decoder(**_exchanged(inputs, fed))})


def _exchanged(inputs: dict[str, Any], fed: FedTokens) -> dict[str, Any]:
    found, shape = dict(inputs), inputs["inputs_embeds"].shape[:2]  # [1, T], or [T, 1] of rows of one token each
    for name, (tokens, rows) in fed.rows.items():
        if name == DEEPSTACK:
            mask = torch.zeros(shape.numel(), dtype=torch.bool, device=tokens.device)
            found |= {MASK: mask.index_fill(0, tokens, True).view(shape), DEEPSTACK: list(rows.unbind(1))}
        else:
            found[name] = found[name].flatten(0, 1).index_copy(0, tokens, rows.to(found[name])).unflatten(0, shape)
    if fed.positions is not None:  # of one axis without a dimension for it
        found["position_ids"] = fed.positions.unflatten(1, shape).squeeze(0)
    return found
