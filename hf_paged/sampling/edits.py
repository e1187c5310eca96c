"""Stock's built-in logits processors for requests with their own settings: settings on the device, tokens from logits.

Order and semantics are those of transformers' `_get_logits_processor`, in fp32. Presence and frequency penalties, which
transformers lacks, are OpenAI's and follow the repetition penalty, as in vLLM. On CUDA the kernels of `edit_logits`
run, without a host sync; on a CPU `edit_reference`.
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
    """`Edits` of one request in the encoding of `EditState` (see `EditTable`), which a step only copies."""

    features: frozenset[str]
    floats: np.ndarray  # of `FLOATS`, float32
    factor: float
    numbers: np.ndarray  # of `NUMBERS`, int64
    lists: tuple[bytes, ...]  # of `LISTS`, each int32


def encode_edits(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> EditLines:
    """Encode the edits of one request.

    Args:
        prompt_length, max_length: Tokens of the prompt as given, and maximum tokens of the whole sequence.
        eos: Token ids that the length penalty favours.

    Raises:
        ValueError: If the tables cannot hold a number or a list; the error names the setting.
    """
    return _NEUTRAL_LINES if edits == NEUTRAL else _encode(edits, prompt_length, max_length, eos)


def _encode(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> EditLines:
    floats = float_line(", ".join(FLOATS), [read(edits) for read in FLOATS.values()])
    numbers = int_line("lengths and token ids", [read(edits, prompt_length, max_length) for read in NUMBERS.values()])
    lists = tuple(read(edits, eos).tobytes() for read in LISTS.values())
    return EditLines(edits.features(), floats, float(edits.decay_factor), numbers, lists)


_NEUTRAL_LINES = _encode(NEUTRAL, 0, 0, ())


class EditState:
    """Settings of ``num_slots`` slots on the device, and of a neutral one for rows that pad a graph.

    ``generation`` rises when a table moves, since graphs captured before read the old memory.
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

    def put(self, slots: np.ndarray, edits: Sequence[EditLines]) -> None:
        """Set the edits of the requests that got ``slots`` [N], replacing those of the slots' former requests.

        Does not wait for the device. After an exception in an earlier call all other slots are neutral, since running
        requests are admitted again.
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
    tops: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
    masks: TokenMasks | None = None,
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
        # An invalid row (-1) ends at commit, but an overlapping step needs a valid token id.
        history[slots, rows.position] = tokens.clamp(min=0).to(torch.int32)
    return tokens
