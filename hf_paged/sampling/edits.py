"""Stock's built-in logits processors for requests that each have their own: settings on the device, tokens from logits.

Order and semantics are those of transformers' `_get_logits_processor`, in fp32; presence and frequency penalties, which
it has not, are OpenAI's and stand behind the repetition penalty, as in vLLM. On CUDA the kernels of `edit_logits` do
the work, without a host sync; `edit_reference` is what a CPU runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.sampling.edit_lines import SharedLines, float_line, int_line, stock_decays_finite_only
from hf_paged.sampling.edit_logits import edit_logits
from hf_paged.sampling.edit_reference import FLOATS, LISTS, NEUTRAL, NUMBERS, Edits, EditTable, edited_scores
from hf_paged.sampling.edit_warpers import WARPERS, draw_warped, renormalize_greedy, settle_extremes
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import SamplingRows, log_probs_reference, sample_reference
from hf_paged.sampling.table import SamplingTable
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens
from hf_paged.sampling.top_log_probs import top_processed


class EditLines(NamedTuple):
    """`Edits` of one request, encoded as `EditState` keeps them (see `EditTable`), so that a step only copies them."""

    features: frozenset[str]
    floats: np.ndarray  # of `FLOATS`, float32
    factor: float
    numbers: np.ndarray  # of `NUMBERS`, int64
    lists: tuple[bytes, ...]  # of `LISTS`, each int32


def encode_edits(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> EditLines:
    """The lines of one request.

    Args:
        prompt_length, max_length: of the whole sequence in tokens, the prompt as it was given.
        eos: ids that the length penalty favours.

    Raises:
        ValueError: a number that the tables cannot hold, or a list that is too long for them; names the setting.
    """
    return _NEUTRAL_LINES if edits == NEUTRAL else _encode(edits, prompt_length, max_length, eos)


def _encode(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> EditLines:
    floats = float_line(", ".join(FLOATS), [read(edits) for read in FLOATS.values()])
    numbers = int_line("lengths and token ids", [read(edits, prompt_length, max_length) for read in NUMBERS.values()])
    lists = tuple(read(edits, eos).tobytes() for read in LISTS.values())
    return EditLines(edits.features(), floats, float(edits.decay_factor), numbers, lists)


_NEUTRAL_LINES = _encode(NEUTRAL, 0, 0, ())


class EditState:
    """Settings of ``num_slots`` slots on the device, and of one more that stays neutral: rows that pad a graph.

    ``generation`` grows when a table moved: graphs that were captured before read the old one.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        floats = torch.tensor(_NEUTRAL_LINES.floats, dtype=torch.float32, device=device)[:, None]
        ints = (*_NEUTRAL_LINES.numbers.tolist(), *[0] * len(LISTS))
        numbers = torch.tensor(ints, dtype=torch.int64, device=device)[:, None]
        self._neutral = floats, numbers
        self._floats, self._ints = floats.repeat(1, num_slots + 1), numbers.repeat(1, num_slots + 1)
        self._factors = torch.ones(num_slots + 1, dtype=torch.float64, device=device)
        self._lists = {name: SharedLines(device) for name in LISTS}
        self._growths = 0
        self._edited: set[int] = set()
        self._half_written = False  # an exception, or an interrupt, left `put`

    @property
    def generation(self) -> int:
        return self._growths + sum(lists.moves for lists in self._lists.values())

    def grow(self, num_slots: int) -> None:
        """Make room for more slots, neutral ones; what was the neutral line behind the last slot is a slot then."""
        floats, ints = self._neutral
        more = num_slots + 1 - len(self._factors)
        floats = torch.cat([self._floats, floats.expand(-1, more)], dim=1)
        ints = torch.cat([self._ints, ints.expand(-1, more)], dim=1)
        factors = torch.cat([self._factors, self._factors.new_ones(more)])
        self._growths += 1  # no call between this and the next line: an interrupt comes behind calls
        self._floats, self._ints, self._factors = floats, ints, factors

    @property
    def in_use(self) -> bool:
        """False while every slot is neutral: `put` has nothing to do for settings that are, too."""
        return bool(self._edited) or self._half_written

    @property
    def table(self) -> EditTable:
        ints = dict(zip((*NUMBERS, *LISTS), self._ints, strict=True))
        return EditTable(
            **dict(zip(FLOATS, self._floats, strict=True)), **{name: ints[name] for name in NUMBERS},
            decay_factor=self._factors, lines={name: ints[name] for name in LISTS},
            lists={name: lists.table for name, lists in self._lists.items()},
        )

    def put(self, slots: np.ndarray, edits: Sequence[EditLines]) -> None:
        """Settings of the requests that got ``slots`` [N], in place of those of the slots' former requests.

        Nothing is waited for. After a call that an exception left, every slot is neutral but for those of this call:
        whoever ran is admitted again.
        """
        if self._half_written:
            self._forget()
        every = zip(np.asarray(slots).tolist(), edits, strict=True)
        changed = [(slot, e) for slot, e in every if e.features or slot in self._edited]
        if not changed:
            return
        self._half_written = True
        places = [slot for slot, _ in changed]
        for slot, e in changed:
            (self._edited.add if e.features else self._edited.discard)(slot)
        lines = [self._lists[name].assign(places, [e.lists[i] for _, e in changed]) for i, name in enumerate(LISTS)]
        index = upload(np.array(places, dtype=np.int64), self._device)
        self._floats[:, index] = upload(np.stack([e.floats for _, e in changed], axis=1), self._device)
        self._factors[index] = upload(np.array([e.factor for _, e in changed], dtype=np.float64), self._device)
        ints = np.concatenate([np.stack([e.numbers for _, e in changed], axis=1), np.array(lines, dtype=np.int64)])
        self._ints[:, index] = upload(ints, self._device)
        self._half_written = False

    def _forget(self) -> None:
        """Every slot neutral; graphs stay valid."""
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
    tops: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """One token per row from edited logits: `sample_tokens` behind the processors of each row's slot.

    A row with neutral settings gets the token that it gets without this (on CUDA but for rounding, where fp32 scores
    are summed in another order than bf16 logits).

    Args:
        logits: ``[R, V]``, not changed.
        sampling_table: temperature, top-k, top-p, min-p, seed, minimum length of S slots.
        edit_state: the other settings of S slots.
        slots: ``[R]`` int64.
        position: ``[R]`` int64 or int32, lengths of what the tokens follow.
        history: ``[>= S, capacity]`` int32, tokens of the slots before `position`; receives the new ones.
        features: what the rows' `Edits.features()` name together; other stages are not run.
        logprob: ``[R]`` float32, as of `sample_tokens`.
        tops: receive what `top_processed` makes of the edited scores.
        masks: tokens that are barred besides, where stock runs processors of the caller: behind all that come before
            temperature.

    Returns:
        ``[R]`` int64, or -1 where stock's ``argmax`` or ``multinomial`` would trip over the edited scores.
    """
    edit = edit_state.table
    settings = (sampling_table, edit, slots, position, history, features)
    if logits.is_cuda:
        scores = edit_logits(logits, *settings, decays_finite_only=stock_decays_finite_only())
    else:
        scores = edited_scores(logits, *settings)
    if masks is not None:
        mask_tokens(scores, masks)
    # EOS was barred at its place in the order; what came after may have lifted the bar.
    table = sampling_table._replace(eos=sampling_table.eos[:, :0])
    on_cuda, torch_stages = logits.is_cuda, features & {"remove_invalid", "renormalize", *WARPERS}
    if on_cuda and not torch_stages and not tops:
        return sample_tokens(scores, table, slots, position, history=history, logprob=logprob)
    rows, warped = SamplingRows.of(table, slots, position), bool(features & WARPERS)
    if "remove_invalid" in features:
        settle_extremes(scores, rows)
    if "renormalize" in features:
        scores = renormalize_greedy(scores, rows, edit.renormalize[slots])
    if on_cuda:
        tokens = sample_tokens(scores, table, slots, position, history=history, logprob=logprob)
    else:
        tokens = sample_reference(scores, rows)
        if logprob is not None:
            logprob.copy_(log_probs_reference(scores, rows, tokens))
    if warped:
        draw_warped(scores, rows, edit, slots, tokens, logprob)
    top_processed(scores, rows, features, tops, edit, slots)
    if warped or not on_cuda:
        # An invalid row (-1) ends at commit; its stand-in must still be a real token for a step that overlaps.
        history[slots, rows.position] = tokens.clamp(min=0).to(torch.int32)
    return tokens
