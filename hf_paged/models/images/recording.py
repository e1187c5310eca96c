"""Rows of a call with images: what the model's own code feeds its decoder, as prompts that packed steps can compute.

The class's own `prepare_inputs_for_generation` and `forward` run once over the call's inputs, up to the decoder. So the
tower, the places of images, positions and scales are the class's own. What this file does not know goes to stock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_paged.errors import Reason
from hf_paged.models.base import AttentionMask
from hf_paged.models.images.decoder_inputs import MASK, handed_over
from hf_paged.models.images.fed_contents import FedContents
from hf_paged.models.images.fed_prompt import DEEPSTACK, EMBEDS, PER_LAYER, FedPrompt, FedRun
from hf_paged.models.images.masks import STAYS_IN_STOCK, sights_of

_BY_TOKEN = (EMBEDS, PER_LAYER)
_KNOWN = frozenset({*_BY_TOKEN, DEEPSTACK, MASK, "position_ids", "attention_mask"})
_CACHES = frozenset({"cache", "past_key_values"})
_INERT = _CACHES | {"use_cache", "return_dict", "input_ids"}


def record(model: Any, path: str, body: str, masks: Sequence[AttentionMask], input_ids: torch.Tensor,
           lengths: Sequence[int], model_kwargs: Mapping[str, Any], contents: FedContents,
           through: Callable[[nn.Module], None] = lambda body: None) -> list[FedPrompt | None] | Reason:
    """Return what is fed for each row of a call in place of its ids (None: nothing), or why stock has to run it.

    Args:
        model: the causal LM.
        path, body: paths of its decoder and of the module around it that takes ids.
        masks: of the decoder's attention calls.
        input_ids: [B, T], padded on the left.
        lengths: tokens of each row.
        model_kwargs: as stock's `generate` gives them to its first forward.
        through: puts encoders in place of those of a view of the body (`KnownImages.through`).

    Raises what the model's own code raises, an error about the number of placeholders for instance.
    """
    kwargs = {name: value for name, value in model_kwargs.items() if name not in _CACHES}

    def whole(view: Any) -> None:
        through(view.get_submodule(body))
        inputs = view.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        view(**{name: value for name, value in inputs.items() if name not in ("return_dict", "logits_to_keep")},
             return_dict=True)

    given = handed_over(model, path, whole)
    why = _why_not(given, input_ids, kwargs.get("position_ids"))
    sights = why or sights_of(given.get("attention_mask"), lengths, masks)
    if isinstance(sights, Reason):
        return sights
    # As packed steps run it: for text alone.
    plain = handed_over(model, path, lambda view: view.get_submodule(body)(
        input_ids=input_ids, position_ids=_positions(given, input_ids)[-1], return_dict=True, use_cache=False))
    fed = _where_fed(given, plain)
    positions, deepstack = _positions(given, input_ids).cpu().numpy(), _deepstack(given)
    found: list[FedPrompt | None] = []
    distinct: dict[Hashable, FedPrompt] = {}  # equal rows have one prompt, which makes the keys of its blocks once
    ids = input_ids.tolist()
    for row, (length, is_fed) in enumerate(zip(lengths, fed.cpu().numpy(), strict=True)):
        start, runs = input_ids.shape[1] - length, []
        for first, end in _runs(is_fed[start:]):
            at = row, slice(start + first, start + end)
            rows = {name: given[name][at] for name in _BY_TOKEN if given.get(name) is not None}
            if deepstack is not None:
                rows[DEEPSTACK] = _adds(given[MASK], deepstack, *at)
            runs.append(FedRun(first, *contents.find(rows)))
        own = positions[:, row, start:].copy()  # on a CPU these are the memory of the caller's own
        is_plain = bool((own == np.arange(length)).all())
        if is_plain and not runs and not sights[row]:
            found.append(None)
        else:
            prompt = FedPrompt(ids[row][start:], tuple(runs), None if is_plain else own, sights[row])
            found.append(distinct.setdefault(prompt.content, prompt))
    return found


def _why_not(given: dict[str, Any], input_ids: torch.Tensor, counted: torch.Tensor | None) -> Reason | None:
    """Return what this file does not know of a decoder's inputs, or None.

    ``counted``: the positions from which stock's `generate` goes on behind the prompt, if it has any.
    """
    odd = [name for name, value in given.items() if value is not None and value is not False
           and name not in _KNOWN | _INERT and not (isinstance(value, int) and value == 0)]
    embeds, positions = given.get(EMBEDS), given.get("position_ids")
    if embeds is None or embeds.shape[:2] != input_ids.shape:
        odd.append("no vector for each token")
    if positions is not None and (positions.ndim not in (2, 3) or positions.shape[-1] != input_ids.shape[1]):
        odd.append(f"positions of shape {tuple(positions.shape)}")
    elif positions is not None and not _goes_on(positions, counted):
        odd.append("positions from which `generate` does not go on")
    if (given.get(DEEPSTACK) is None) != (given.get(MASK) is None):
        odd.append("what to add behind layers without places, or places alone")
    if odd:
        return Reason("images of a model whose decoder is given {}", odd[0], remedy=STAYS_IN_STOCK)
    return None


def _goes_on(positions: torch.Tensor, counted: torch.Tensor | None) -> bool:
    """Return whether a decoder's positions are those that `generate` counts on from, by one a token."""
    if counted is None:  # those of the mask
        return positions.ndim == 2
    return positions.ndim == counted.ndim and bool((positions == counted.to(positions.device)).all())


def _positions(given: dict[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of a call's tokens [A, B, T] on each axis; without any a decoder counts from 0."""
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return (positions if positions.ndim == 3 else positions[None]).expand(-1, len(input_ids), -1)


def _where_fed(given: dict[str, Any], plain: dict[str, Any]) -> torch.Tensor:
    """Return [B, T], True where the decoder is given something else than for text alone."""
    fed = (given[EMBEDS] != plain[EMBEDS]).any(-1)
    if (per_layer := given.get(PER_LAYER)) is not None:
        fed |= (per_layer != plain[PER_LAYER]).flatten(2).any(-1)
    if (visual := given.get(MASK)) is not None:
        fed |= visual.to(fed.device)
    return fed


def _runs(is_fed: np.ndarray) -> list[tuple[int, int]]:
    """Return first and end of each run of True."""
    edges = np.flatnonzero(np.diff(is_fed.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def _deepstack(given: dict[str, Any]) -> torch.Tensor | None:
    """Return what is added to the visual tokens of all rows, one after the other, behind each layer [n, layers, H]."""
    adds = given.get(DEEPSTACK)
    return None if adds is None else torch.stack(list(adds), 1)


def _adds(visual: torch.Tensor, deepstack: torch.Tensor, row: int, tokens: slice) -> torch.Tensor:
    """Return what is added to some tokens of a row [n, layers, H]; zeros for those that are not visual."""
    before = int(visual[:row].sum()) + int(visual[row, : tokens.start].sum())
    own = visual[row, tokens]
    adds = deepstack.new_zeros(len(own), *deepstack.shape[1:])
    adds[own] = deepstack[before : before + int(own.sum())]
    return adds
