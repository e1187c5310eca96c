"""Stock's built-in logits processors for requests with their own settings: settings on the device, tokens from logits.

Order and semantics are those of transformers' `_get_logits_processor`, in fp32. Presence and frequency penalties, which
transformers lacks, are OpenAI's and follow the repetition penalty, as in vLLM. On CUDA the kernels of `edit_logits`
run, without a host sync; on a CPU `edit_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.sampling.edit_lines import SharedLines, stock_decays_finite_only
from hf_paged.sampling.edit_logits import edit_logits
from hf_paged.sampling.edit_reference import (
    FLOATS,
    LISTS,
    NUMBERS,
    WARPERS,
    EditTable,
    draw_warped,
    edited_scores,
    renormalize_greedy,
    settle_extremes,
)
from hf_paged.sampling.log_probs import NO_LOG_PROBS, top_processed
from hf_paged.sampling.sampler import SamplingRows, sample
from hf_paged.sampling.slot_row import NEUTRAL_ROW, SlotRow
from hf_paged.sampling.table import SamplingTable
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens


class EditState:
    """Settings of ``num_slots`` slots on the device, and of a neutral one for rows that pad a graph.

    ``generation`` rises when a table moves, since graphs captured before read the old memory.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        floats = torch.tensor(NEUTRAL_ROW.edit_floats, dtype=torch.float32, device=device)[:, None]
        ints = (*NEUTRAL_ROW.edit_numbers.tolist(), *[0] * len(LISTS))
        numbers = torch.tensor(ints, dtype=torch.int64, device=device)[:, None]
        self._neutral = floats, numbers
        self._floats, self._ints = floats.repeat(1, num_slots + 1), numbers.repeat(1, num_slots + 1)
        self._factors = torch.ones(num_slots + 1, dtype=torch.float64, device=device)
        self._lists = {name: SharedLines(device) for name in LISTS}
        self._growths = 0
        self._edited: set[int] = set()
        self._half_written = False  # True after an exception or interrupt in `put`

    @property
    def generation(self) -> int:
        return self._growths + sum(lists.moves for lists in self._lists.values())

    def grow(self, num_slots: int) -> None:
        """Add neutral slots; the former neutral line becomes a slot."""
        floats, ints = self._neutral
        more = num_slots + 1 - len(self._factors)
        floats = torch.cat([self._floats, floats.expand(-1, more)], dim=1)
        ints = torch.cat([self._ints, ints.expand(-1, more)], dim=1)
        factors = torch.cat([self._factors, self._factors.new_ones(more)])
        self._growths += 1  # no call between this and the next line, since an interrupt can only come after a call
        self._floats, self._ints, self._factors = floats, ints, factors

    @property
    def in_use(self) -> bool:
        """Return whether a slot may have edits; if not, `put` has nothing to do for neutral settings."""
        return bool(self._edited) or self._half_written

    @property
    def table(self) -> EditTable:
        ints = dict(zip((*NUMBERS, *LISTS), self._ints, strict=True))
        return EditTable(
            **dict(zip(FLOATS, self._floats, strict=True)), **{name: ints[name] for name in NUMBERS},
            decay_factor=self._factors, lines={name: ints[name] for name in LISTS},
            lists={name: lists.table for name, lists in self._lists.items()},
        )

    def put(self, slots: np.ndarray, rows: Sequence[SlotRow]) -> None:
        """Set the edits of the requests that got ``slots`` [N], replacing those of the slots' former requests.

        Does not wait for the device. After an exception in an earlier call all other slots are neutral, since running
        requests are admitted again.
        """
        if self._half_written:
            self._forget()
        every = zip(np.asarray(slots).tolist(), rows, strict=True)
        changed = [(slot, row) for slot, row in every if row.stages or slot in self._edited]
        if not changed:
            return
        self._half_written = True
        places = [slot for slot, _ in changed]
        for slot, row in changed:
            (self._edited.add if row.stages else self._edited.discard)(slot)
        lines = [self._lists[name].assign(places, [row.edit_lists[i] for _, row in changed])
                 for i, name in enumerate(LISTS)]
        index = upload(np.array(places, dtype=np.int64), self._device)
        self._floats[:, index] = upload(np.stack([row.edit_floats for _, row in changed], axis=1), self._device)
        self._factors[index] = upload(np.array([row.edit_factor for _, row in changed], dtype=np.float64), self._device)
        numbers = np.stack([row.edit_numbers for _, row in changed], axis=1)
        ints = np.concatenate([numbers, np.array(lines, dtype=np.int64)])
        self._ints[:, index] = upload(ints, self._device)
        self._half_written = False

    def _forget(self) -> None:
        """Make every slot neutral; graphs stay valid."""
        floats, ints = self._neutral
        self._floats.copy_(floats.expand_as(self._floats))
        self._factors.fill_(1.0)
        self._ints.copy_(ints.expand_as(self._ints))
        for lists in self._lists.values():
            lists.forget()
        self._edited.clear()
        self._half_written = False


def sample_edited(
    logits: torch.Tensor, sampling_table: SamplingTable, edit_state: EditState, slots: torch.Tensor,
    position: torch.Tensor, history: torch.Tensor, features: frozenset[str], logprob: torch.Tensor | None = None,
    tops: Mapping[str, torch.Tensor] = NO_LOG_PROBS, masks: TokenMasks | None = None,
) -> torch.Tensor:
    """Sample one token per row from edited logits: `sample_tokens` after the processors of each row's slot.

    A row with neutral settings gets the token of `sample_tokens` (on CUDA up to rounding, where fp32 scores are summed
    in another order than bf16 logits).

    Args:
        logits: ``[R, V]``, not changed.
        sampling_table: Temperature, top-k, top-p, min-p, seed and minimum length of S slots.
        edit_state: The other settings of S slots.
        slots: ``[R]`` int64.
        position: ``[R]`` int64 or int32, positions of the sampled tokens.
        history: ``[>= S, capacity]`` int32, tokens of the slots before `position`; receives the sampled tokens.
        features: Union of the rows' `Edits.features()`; other stages are not run.
        logprob: ``[R]`` float32, as in `sample_tokens`.
        tops: Receive the results of `top_processed` for the edited scores.
        masks: Further barred tokens, applied where stock runs the caller's processors: after all processors before
            temperature.

    Returns:
        ``[R]`` int64, or -1 where stock's ``argmax`` or ``multinomial`` would fail on the edited scores.
    """
    edit = edit_state.table
    settings = (sampling_table, edit, slots, position, history, features)
    if logits.is_cuda:
        scores = edit_logits(logits, *settings, decays_finite_only=stock_decays_finite_only())
    else:
        scores = edited_scores(logits, *settings)
    if masks is not None:
        mask_tokens(scores, masks)
    # The edits have barred EOS in stock's order; barring it here again would undo later stages.
    table = sampling_table._replace(eos=sampling_table.eos[:, :0])
    if not tops and not features & {"remove_invalid", "renormalize", *WARPERS}:
        return sample(scores, table, slots, position, history, logprob)
    rows = SamplingRows.of(table, slots, position)
    if "remove_invalid" in features:
        settle_extremes(scores, rows)
    if "renormalize" in features:
        scores = renormalize_greedy(scores, rows, edit.renormalize[slots])
    tokens = sample(scores, table, slots, position, history, logprob)
    if features & WARPERS:
        draw_warped(scores, rows, edit, slots, tokens, logprob)
        history[slots, rows.position] = tokens.clamp(min=0).to(torch.int32)
    top_processed(scores, rows, features, tops, edit, slots)
    return tokens
