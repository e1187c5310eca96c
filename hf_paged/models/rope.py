"""Cosines and sines of every position, computed once by the model's own rotary module."""

from __future__ import annotations

from typing import Any

import torch


class RopeTable:
    """``cos`` and ``sin`` [max_length - 1, D] in the model's dtype: the last token of a sequence is never an input.

    The memory stays where it is when the values are renewed, since CUDA graphs read from it.
    """

    def __init__(self) -> None:
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        self._source: tuple[torch.Tensor, float] | None = None

    def update(self, rotary: Any, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Renew the tables if the module's frequencies are others than at the last call."""
        length = max(1, max_length - 1)
        fits = self.cos is not None and len(self.cos) == length and (self.cos.dtype, self.cos.device) == (dtype, device)
        if fits and self.is_made_from(rotary):
            return
        like = torch.empty(0, dtype=dtype, device=device)
        cos, sin = rotary(like, torch.arange(length, device=device)[None])
        if fits and self.cos is not None and self.sin is not None and cos[0].shape == self.cos.shape:
            self.cos.copy_(cos[0])
            self.sin.copy_(sin[0])
        else:
            self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        # Taken after the call: modules of "dynamic" types reset their frequencies in it.
        self._source = (rotary.inv_freq.clone(), rotary.attention_scaling)

    def is_made_from(self, rotary: Any) -> bool:
        """True while the module's frequencies and scaling are those of the tables."""
        if self._source is None:
            return False
        frequencies, scaling = self._source
        return scaling == rotary.attention_scaling and torch.equal(frequencies, rotary.inv_freq)


def longest_length(config: Any, asked: int | None) -> int:
    """Tokens of the longest sequence whose frequencies are those that stock would compute it with, in any batch.

    Most types' depend on no length: any that is `asked` for will do, and without one the model's positions, which
    "yarn" extends. "dynamic" and "longrope" change theirs with the longest sequence of the batch: up to the original
    length they do not.
    """
    positions: int = config.max_position_embeddings
    parameters, longest, limits = config.rope_parameters, positions, []
    if not parameters:  # taken out of the config behind the module's back
        limits.append(positions)
    elif "rope_type" in parameters:
        parameters = {"": parameters}
    for one in filter(None, (parameters or {}).values()):  # of each type of layer
        original = one.get("original_max_position_embeddings") or positions
        if one["rope_type"] == "yarn":
            longest = max(longest, int((one.get("factor") or 1.0) * original))
        elif one["rope_type"] == "longrope":
            limits.append(min(positions, original))
        elif "dynamic" in one["rope_type"]:
            limits.append(positions)
    return min([longest if asked is None else asked, *limits])
