"""Stock's built-in logits processors for requests with their own settings: settings on the device, tokens from logits.

Order and semantics are those of transformers' `_get_logits_processor`, in fp32. Presence and frequency penalties, which
transformers lacks, are OpenAI's and follow the repetition penalty, as in vLLM. On CUDA the kernels of `edit_logits`
run, without a host sync; on a CPU `edit_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.sampling.edit_lines import (
    SharedLines,
    encode_bars,
    encode_rules,
    encode_tokens,
    float_line,
    int_line,
    stock_decays_finite_only,
)
from hf_paged.sampling.edit_logits import EditTable, edit_logits
from hf_paged.sampling.edit_reference import edited_scores
from hf_paged.sampling.edit_warpers import WARPERS, draw_warped, renormalize_greedy, settle_extremes
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import SamplingRows, log_probs_reference, sample_reference
from hf_paged.sampling.table import SamplingTable
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens
from hf_paged.sampling.top_log_probs import top_processed

_NEVER = 1 << 62
_NAMES = ("sequence_bias", "bad_words", "also_seen", "forced_eos", "decay_eos", "suppress", "begin_suppress")
_NEUTRAL_FLOATS, _NEUTRAL_NUMBERS = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0), (_NEVER, 0, -1, -1, -1, 0, 0, 0)


@dataclass(frozen=True)
class Edits:
    """Edits of one request's logits; the defaults have no effect. Lengths and starts are in tokens of the request."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the score of every generated token
    frequency_penalty: float = 0.0  # subtracted per occurrence of a generated token
    also_seen: tuple[int, ...] = ()  # penalised like tokens of the sequence
    no_repeat_ngram_size: int = 0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # without single EOS tokens, which stock drops
    forced_bos_token_id: int | None = None  # the token after a prompt of one token
    forced_eos_token_ids: tuple[int, ...] = ()  # for the last allowed position
    remove_invalid_values: bool = False
    decay_start: int | None = None  # exponential_decay_length_penalty, in new tokens
    decay_factor: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    typical_p: float = 1.0  # this and the next two apply to sampling only
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False

    def features(self) -> frozenset[str]:
        """Return the names of the stages that this request needs, for `sample_edited`; empty for neutral settings."""
        wanted = {
            "sequence_bias": bool(self.sequence_bias),
            "repetition_penalty": self.repetition_penalty != 1.0,
            "counts": self.presence_penalty != 0.0 or self.frequency_penalty != 0.0,
            "no_repeat_ngram": self.no_repeat_ngram_size > 0,
            "bad_words": bool(self.bad_words_ids),
            "forced_bos": self.forced_bos_token_id is not None,
            "forced_eos": bool(self.forced_eos_token_ids),
            "remove_invalid": self.remove_invalid_values,
            "decay": self.decay_start is not None,
            "suppress": bool(self.suppress_tokens),
            "begin_suppress": bool(self.begin_suppress_tokens),
            "typical": self.typical_p < 1.0,
            "epsilon": 0.0 < self.epsilon_cutoff < 1.0,
            "eta": 0.0 < self.eta_cutoff < 1.0,
            "renormalize": self.renormalize_logits,
        }
        return frozenset(name for name, on in wanted.items() if on)


NEUTRAL = Edits()


class EditLines(NamedTuple):
    """`Edits` of one request in the encoding of `EditState` (see `EditTable`), which a step only copies."""

    features: frozenset[str]
    floats: np.ndarray  # [6] float32
    factor: float
    numbers: np.ndarray  # [8] int64
    lists: tuple[bytes, ...]  # int32, in the order of `_NAMES`


def encode_edits(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> EditLines:
    """Encode the edits of one request.

    Args:
        prompt_length, max_length: Tokens of the prompt as given, and maximum tokens of the whole sequence.
        eos: Token ids that the length penalty favours.

    Raises:
        ValueError: If the tables cannot hold a number or a list; the error names the setting.
    """
    if edits == NEUTRAL:
        return _NEUTRAL_LINES
    cutoffs = _fraction(edits.epsilon_cutoff), _fraction(edits.eta_cutoff)
    floats = float_line("repetition_penalty, typical_p, presence_penalty, frequency_penalty", (
        edits.repetition_penalty, edits.typical_p, *cutoffs, edits.presence_penalty, edits.frequency_penalty,
    ))
    numbers = int_line("lengths and token ids", _numbers(edits, prompt_length, max_length))
    return EditLines(edits.features(), floats, float(edits.decay_factor), numbers, _lists(edits, eos))


class EditState:
    """Settings of ``num_slots`` slots on the device, and of a neutral one for rows that pad a graph.

    ``generation`` rises when a table moves, since graphs captured before read the old memory.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        floats = torch.tensor(_NEUTRAL_FLOATS, dtype=torch.float32, device=device)[:, None]
        numbers = torch.tensor(_NEUTRAL_NUMBERS + (0,) * len(_NAMES), dtype=torch.int64, device=device)[:, None]
        self._neutral = floats, numbers
        self._floats, self._ints = floats.repeat(1, num_slots + 1), numbers.repeat(1, num_slots + 1)
        self._factors = torch.ones(num_slots + 1, dtype=torch.float64, device=device)
        self._lists = {name: SharedLines(device) for name in _NAMES}
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
        numbers, lines = self._ints[: -len(_NAMES)], self._ints[-len(_NAMES) :]
        lists = {name: lists.table for name, lists in self._lists.items()}
        return EditTable._make(
            (*self._floats, self._factors, *numbers, dict(zip(_NAMES, lines, strict=True)), lists)
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
        lines = [self._lists[name].assign(places, [e.lists[i] for _, e in changed]) for i, name in enumerate(_NAMES)]
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


def _fraction(cutoff: float) -> float:
    return cutoff if 0.0 < cutoff < 1.0 else 0.0


def _numbers(edits: Edits, prompt_length: int, max_length: int) -> tuple[int, ...]:
    bos = edits.forced_bos_token_id
    return (
        _NEVER if edits.decay_start is None else prompt_length + edits.decay_start,
        edits.no_repeat_ngram_size,
        -1 if bos is None else bos,
        max_length - 1 if edits.forced_eos_token_ids else -1,
        prompt_length + (prompt_length == 1 and bos is not None) if edits.begin_suppress_tokens else -1,
        edits.remove_invalid_values,
        edits.renormalize_logits,
        prompt_length,
    )


def _lists(edits: Edits, eos: tuple[int, ...]) -> tuple[bytes, ...]:
    lists = {
        "sequence_bias": encode_rules(edits.sequence_bias),
        "bad_words": encode_bars(edits.bad_words_ids),
        "also_seen": encode_tokens(edits.also_seen if edits.repetition_penalty != 1.0 else ()),
        "forced_eos": encode_tokens(edits.forced_eos_token_ids),
        # Without duplicates, since stock penalises a repeated id once.
        "decay_eos": encode_tokens(() if edits.decay_start is None else tuple(dict.fromkeys(eos))),
        "suppress": encode_tokens(edits.suppress_tokens),
        "begin_suppress": encode_tokens(edits.begin_suppress_tokens),
    }
    return tuple(lists[name].tobytes() for name in _NAMES)


_NEUTRAL_LINES = EditLines(
    frozenset(), np.array(_NEUTRAL_FLOATS, np.float32), 1.0, np.array(_NEUTRAL_NUMBERS, np.int64), _lists(NEUTRAL, ()),
)


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
