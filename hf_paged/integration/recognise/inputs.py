"""Checks of the inputs that stock generate passes to a decoding method: ids, mask, positions, cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin

from hf_paged.engine.engine import FROM_INSIDE, IN_UPDATE, Engine
from hf_paged.errors import Reason
from hf_paged.integration import paths
from hf_paged.integration.caches import CACHE_NAME
from hf_paged.options.arguments import described

_IDS = "Give integers of shape [rows, tokens], with at least one token."
_PAD_LEFT = "Pad on the left: `AutoTokenizer.from_pretrained(..., padding_side=\"left\")`."
_CACHE = "Leave the cache out: the prefix cache finds earlier tokens by itself, if the prompt is given as a whole."


class DecodingInputs(NamedTuple):
    """The arguments of one of stock's decoding methods, as stock's `generate` prepared them."""

    input_ids: torch.LongTensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: GenerationConfig
    synced_gpus: bool
    model_kwargs: dict[str, Any]

    def loop(self, method: Callable, **more: Any) -> Callable[..., Any]:
        """Return stock's `method` with these inputs and ``more``; it takes a receiver and ``model_kwargs``.

        As in stock the ids come by position: a method of the user's may name them otherwise.
        """
        given = {**more, **dict(zip(self._fields[1:-1], self[1:-1], strict=True))}
        return lambda receiver, **model_kwargs: method(receiver, self.input_ids, **{**given, **model_kwargs})

    def num_new(self, result: Any) -> int:
        """Return `paths.new_tokens` of a result for these inputs."""
        return paths.new_tokens(result, self.input_ids.shape[1], self.stopping_criteria, self.generation_config)


_NUM_AXES = 3  # of an image or a video: time, height, width


def paged_rows(engine: Engine, inputs: DecodingInputs) -> tuple[list[list[int]], list[str | None]] | Reason:
    """Return the rows without their left padding, and the adapter of each, or why no paged forward can compute them."""
    if (reason := next(input_reasons(engine, inputs), None)) is not None:
        return reason
    ids = inputs.input_ids.cpu().numpy()
    mask, positions = inputs.model_kwargs.get("attention_mask"), inputs.model_kwargs.get("position_ids")
    if mask is None:
        real = np.ones(ids.shape, dtype=np.int64)
    elif tuple(mask.shape) != ids.shape:
        return Reason("attention_mask of shape {} for input_ids of shape {}", tuple(mask.shape), ids.shape,
                      remedy=_PAD_LEFT)
    else:
        real = mask.to("cpu", torch.float64).numpy()
        if not np.isin(real, (0, 1)).all():
            return Reason("attention_mask holds values other than 0 and 1", remedy=_PAD_LEFT)
        real = real.astype(np.int64)
    if not real[:, -1].all() or (np.diff(real, axis=1) < 0).any():
        return Reason("attention_mask has holes, right padding or an empty row", remedy=_PAD_LEFT)
    if positions is not None:
        expected = np.where(real == 1, np.cumsum(real, axis=1) - 1, 0)
        given = positions.cpu().numpy()
        has_axes = _has_axes(engine.model)
        if has_axes and given.ndim == 3 and has_images(inputs.model_kwargs):
            # Those of text, by which masks are made, come first; `record` looks at the others.
            given = given[0] if len(given) == 1 + _NUM_AXES else np.empty(0)
        shape = given.shape[-2:] if has_axes else given.shape
        if shape not in (expected.shape, (1, expected.shape[1])) or not (given == expected).all():
            return Reason("position_ids given by the caller", remedy="Leave them out if they count the tokens from 0.")
    adapters = engine.adapters_of_rows(len(ids))
    if isinstance(adapters, Reason):
        return adapters
    return [row[row_mask == 1].tolist() for row, row_mask in zip(ids, real, strict=True)], adapters


def _has_axes(model: Any) -> bool:
    """Return whether a model's `generate` makes positions for each axis of an image, all alike for text."""
    made_by, name = type(model), "_prepare_position_ids_for_generation"
    return getattr(made_by, name, None) is not getattr(GenerationMixin, name, None)


def input_reasons(engine: Engine, inputs: DecodingInputs) -> Iterator[Reason]:
    """Yield reasons why no paged forward can compute these inputs now, apart from the mask."""
    input_ids = inputs.input_ids
    if engine.is_updating():
        yield Reason("generate was called inside a weight_update() of the same engine", remedy=IN_UPDATE)
    if engine.is_reentrant():
        yield Reason("generate was called from inside a step of the same engine", remedy=FROM_INSIDE)
    if inputs.synced_gpus and not engine.finds_shards():  # ranks with gathered weights need not step together
        yield Reason("synced_gpus=True", remedy="Ranks that wait for each other step by step run in stock. It is not "
                                                "needed where each rank holds the whole model.")
    if input_ids.dtype not in (torch.int32, torch.int64):
        yield Reason("input_ids of dtype {}", input_ids.dtype, remedy=_IDS)
    yield from argument_reasons(inputs.model_kwargs)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        yield Reason("input_ids of shape {}", tuple(input_ids.shape), remedy=_IDS)
    if (reason := engine.unsupported_reason() or engine.precision_reason()) is not None:
        yield reason
    elif isinstance(adapters := engine.adapters_of_rows(len(input_ids)), Reason):
        yield adapters


# Arguments of the forward that change no token, whatever their value, with the reason.
INERT_ARGUMENTS = {
    "labels": "stock's prepare_inputs_for_generation leaves them out: they would only add a loss",
    "num_items_in_batch": "it only divides the loss of labels",
    "tokenizer": "it is generate's own: stop strings and healing are settled before",
    "assistant_tokenizer": "it is generate's own",
}
# Arguments that change no token if they have one of these values.
NEUTRAL_ARGUMENTS: dict[str, tuple] = {
    "use_cache": (True, False),  # the engine has a cache in any case; the tokens are the same
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}


def _marks_text(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.any()


# Arguments that only prompts with images have.
_OF_IMAGES = frozenset({
    "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_grid_thw", "video_grid_thw", "image_sizes",
    "image_position_ids", "second_per_grid_ts", "spatial_shapes", "target_sizes", "target_sizes_videos",
})
# Arguments of image-text models, with a test that is True for values of calls with text alone.
_MAY_BE_OF_TEXT: dict[str, Callable[[Any], bool]] = {
    "mm_encoder_outputs": lambda value: type(value) is dict and not value,
    "token_type_ids": _marks_text,
    "mm_token_type_ids": _marks_text,
}


def has_images(model_kwargs: dict[str, Any]) -> bool:
    """Return whether a call may have images, or videos: the model's own code has to say what it makes of them."""
    return any(value is not None and (name in _OF_IMAGES or (
        name in _MAY_BE_OF_TEXT and not _MAY_BE_OF_TEXT[name](value))) for name, value in model_kwargs.items())


def _holds_tokens(cache: DynamicCache) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # a cache of recurrent states alone, which do not say their length
        return bool(cache.has_previous_state())


def argument_reasons(model_kwargs: dict[str, Any]) -> Iterator[Reason]:
    """Yield reasons for arguments of the model's forward that a paged forward does not support."""
    for name, value in model_kwargs.items():
        if value is None or name in INERT_ARGUMENTS or name in ("attention_mask", "position_ids"):
            continue
        if name == CACHE_NAME:
            if getattr(value, "_is_user_defined", False):
                yield Reason("a cache given by the caller", remedy=_CACHE)
            elif type(value) is not DynamicCache or _holds_tokens(value):
                yield Reason("a cache of type {}", type(value).__name__, remedy=_CACHE)
        elif name not in _OF_IMAGES and name not in _MAY_BE_OF_TEXT and not (
                name == "logits_to_keep" and value == 1) and not any(
                value is neutral for neutral in NEUTRAL_ARGUMENTS.get(name, ())):
            yield Reason(f"model argument {name}={{}}", described(value),
                         remedy="The model's forward gets an argument that pages do not know (`inputs_embeds`, for "
                                "example). Leave it out.")


def check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Raise stock's IndexError for an id outside the vocabulary, which on CUDA would break the context instead."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise IndexError(f"index out of range in self: input_ids holds {low if low < 0 else high}, "
                         f"and the vocabulary has {vocab_size} tokens")
