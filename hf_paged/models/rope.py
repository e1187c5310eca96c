"""Tables of cosines and sines of every position, computed once by the model's own rotary module."""

from __future__ import annotations

from typing import Any

import torch


class RopeTable:
    """Tables ``cos`` and ``sin`` [max_length - 1, D] in the model's dtype: a sequence's last token is never an input.

    Their addresses stay when the values are renewed, since CUDA graphs read from them.
    """

    def __init__(self) -> None:
        self.cos = self.sin = torch.empty(0, dtype=torch.float32, device="cpu")
        self._source: tuple[torch.Tensor, float] | None = None

    def update(self, rotary: Any, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Renew the tables if the module's frequencies changed since the last call."""
        length = max(1, max_length - 1)
        fits = (len(self.cos), self.cos.dtype, self.cos.device) == (length, dtype, device)
        if fits and self.is_made_from(rotary):
            return
        like = torch.empty(0, dtype=dtype, device=device)
        cos, sin = (table[0] for table in rotary(like, torch.arange(length, device=device)[None]))
        if fits and cos.shape == self.cos.shape:
            self.cos.copy_(cos)
            self.sin.copy_(sin)
        else:
            self.cos, self.sin = cos.contiguous(), sin.contiguous()
        # After the call, in which modules of "dynamic" types reset their frequencies.
        self._source = (rotary.inv_freq.clone(), rotary.attention_scaling)

    def is_made_from(self, rotary: Any) -> bool:
        """Return whether the module's frequencies and scaling are those of the tables."""
        if self._source is None:
            return False
        frequencies, scaling = self._source
        return scaling == rotary.attention_scaling and torch.equal(frequencies, rotary.inv_freq)


def longest_length(config: Any, asked: int | None) -> int:
    """Return the length of the longest sequence for which stock uses the same frequencies in any batch.

    Frequencies of most RoPE types depend on no length: the result is `asked`, or if that is None the number of the
    model's positions, which "yarn" extends. "dynamic" and "longrope" change their frequencies with the longest
    sequence of a batch once it exceeds the original length, which is their limit.
    """
    positions: int = config.max_position_embeddings
    parameters, longest, limits = getattr(config, "rope_parameters", None), positions, []
    if not parameters:  # learned positions, or removed from the config after the module was made
        limits.append(positions)
    elif "rope_type" in parameters:
        parameters = {"": parameters}
    for one in filter(None, (parameters or {}).values()):  # one for each type of layer
        original = one.get("original_max_position_embeddings") or positions
        if one["rope_type"] == "yarn":
            longest = max(longest, int((one.get("factor") or 1.0) * original))
        elif one["rope_type"] == "longrope":
            limits.append(min(positions, original))
        elif "dynamic" in one["rope_type"]:
            limits.append(positions)
    return min([longest if asked is None else asked, *limits])
