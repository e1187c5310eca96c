"""What stock generate hands to a decoding method besides settings: ids, mask, positions, cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hf_paged.engine.engine import Engine


def paged_prompts(engine: Engine, input_ids: torch.Tensor, synced_gpus: bool,
                  model_kwargs: dict[str, Any]) -> list[list[int]] | str:
    """The rows without their left padding, or why no paged forward computes them here and now."""
    if engine.is_reentrant():
        return "generate was called from inside a step of the same engine"
    if synced_gpus:
        return "synced_gpus=True"
    if input_ids.dtype not in (torch.int32, torch.int64):
        return f"input_ids of dtype {input_ids.dtype}"
    if (reason := model_kwargs_reason(model_kwargs)) is not None:
        return reason
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        return f"input_ids of shape {tuple(input_ids.shape)}"
    if (reason := engine.unsupported_reason()) is not None:
        return reason
    return prompt_rows(input_ids, model_kwargs)


# Arguments of the forward that change no token, whatever their value: why.
INERT_ARGUMENTS = {
    "labels": "stock's prepare_inputs_for_generation leaves them out: they would only add a loss",
    "num_items_in_batch": "it only divides the loss of labels",
    "tokenizer": "it is generate's own: stop strings and healing are settled before",
    "assistant_tokenizer": "it is generate's own",
}
# Those that change none with one of these values.
NEUTRAL_ARGUMENTS: dict[str, tuple] = {
    "use_cache": (True, False),  # the engine has a cache in any case; the tokens are the same
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}

# What image-text models are given, and what stock's generate makes of it: when it says that there is text alone.
_OF_IMAGES: dict[str, Callable[[Any], bool]] = {
    "pixel_values": lambda value: False,
    "mm_encoder_outputs": lambda value: type(value) is dict and not value,
    "token_type_ids": lambda value: isinstance(value, torch.Tensor) and not value.any(),
}


def model_kwargs_reason(model_kwargs: dict[str, Any]) -> str | None:
    """The first argument for the model's forward that a paged forward does not know, or None."""
    for name, value in model_kwargs.items():
        if value is None or name in INERT_ARGUMENTS or name in ("attention_mask", "position_ids"):
            continue
        if name == "past_key_values":
            if getattr(value, "_is_user_defined", False):
                return "past_key_values given by the caller"
            if type(value) is not DynamicCache or value.get_seq_length():
                return f"a cache of type {type(value).__name__}"
        elif name in _OF_IMAGES:
            if not _OF_IMAGES[name](value):
                return f"{name}: images are left to stock"
        elif not (name == "logits_to_keep" and value == 1) and not any(
                value is neutral for neutral in NEUTRAL_ARGUMENTS.get(name, ())):
            return f"model argument {name}={described(value)}"
    return None


def described(value: Any) -> str:
    """A value in a message: a tensor by its kind, so that equal reasons read alike and no data is shown."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def prompt_rows(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | str:
    """The rows without their left padding; a reason where the mask or the positions are anything else."""
    ids = input_ids.cpu().numpy()
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        real = np.ones(ids.shape, dtype=np.int64)
    elif tuple(mask.shape) != ids.shape:
        return f"attention_mask of shape {tuple(mask.shape)} for input_ids of shape {ids.shape}"
    else:
        real = mask.to("cpu", torch.float64).numpy()
        if not np.isin(real, (0, 1)).all():
            return "attention_mask holds values other than 0 and 1"
        real = real.astype(np.int64)
    if not real[:, -1].all() or (np.diff(real, axis=1) < 0).any():
        return "attention_mask has holes, right padding or an empty row"
    if positions is not None:
        expected = np.where(real == 1, np.cumsum(real, axis=1) - 1, 0)
        given = positions.cpu().numpy()
        if given.shape not in (expected.shape, (1, expected.shape[1])) or not (given == expected).all():
            return "position_ids given by the caller"
    return [row[row_mask == 1].tolist() for row, row_mask in zip(ids, real, strict=True)]


def check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Stock's exception for an id outside the vocabulary; on CUDA its launch would end the process' context."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise IndexError(f"index out of range in self: input_ids holds {low if low < 0 else high}, "
                         f"and the vocabulary has {vocab_size} tokens")
