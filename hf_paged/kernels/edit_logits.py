# mypy: disallow-untyped-defs=False
"""Stock's logits processors over rows of a batch, each with the settings of its slot."""

from __future__ import annotations

from typing import NamedTuple

import torch


class EditTable(NamedTuple):
    """Settings of S slots on the logits' device, [S] each: what `hf_paged.runner.edits.Edits` says, neutral or not.

    Settings of any length lie in ``lists``, by name [lines, width] int32 padded with 0; ``lines`` names each slot's
    line there, line 0 holding nothing. A list of tokens is its length and the tokens. A list of rules is the number of
    targets, three numbers per target (token, where its first rule is, where they end), four per rule (where its prefix
    is, the prefix's length, tokens that the sequence must have, float32 bias as bits), and the prefixes' tokens.
    """

    repetition_penalty: torch.Tensor  # float32
    typical_p: torch.Tensor  # float32
    epsilon_cutoff: torch.Tensor  # float32
    eta_cutoff: torch.Tensor  # float32
    decay_factor: torch.Tensor  # float64
    decay_start: torch.Tensor  # int64, as all below: sequences longer than this are decayed
    no_repeat_ngram_size: torch.Tensor
    forced_bos: torch.Tensor  # -1: none
    forced_eos_at: torch.Tensor  # position of the last allowed token, -1: none
    begin: torch.Tensor  # position at which begin_suppress_tokens are barred, -1: none
    remove_invalid: torch.Tensor  # 0 or 1
    renormalize: torch.Tensor  # 0 or 1
    lines: dict[str, torch.Tensor]
    lists: dict[str, torch.Tensor]
