"""One request's row of the tables on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_paged.sampling.edit_lines import float_line, int_line
from hf_paged.sampling.edit_reference import FLOATS, LISTS, NEUTRAL, NUMBERS, Edits
from hf_paged.sampling.table import FLOAT_NAMES, GREEDY, INT_NAMES, Drawing


class SlotRow(NamedTuple):
    """The settings of one request in the encoding of `RequestState`, which a step only copies.

    ``floats``, ``ints`` and ``eos`` are a row of `SamplingTable`; ``stages`` and ``edit_*`` are one of `EditTable`.
    """

    max_length: int  # of the whole sequence, in tokens
    floats: np.ndarray  # [NUM_FLOATS] float32
    ints: np.ndarray  # [NUM_INTS] int64
    eos: np.ndarray  # [N] int64
    stages: frozenset[str]  # `Edits.features`
    edit_floats: np.ndarray  # of `FLOATS`, float32
    edit_factor: float
    edit_numbers: np.ndarray  # of `NUMBERS`, int64
    edit_lists: tuple[bytes, ...]  # of `LISTS`, each int32
    adapter: str | None
    is_filtered: bool  # top-k, top-p or min-p decide
    with_top: bool  # the request wants the likeliest tokens

    @classmethod
    def of(cls, drawing: Drawing = GREEDY, edits: Edits = NEUTRAL, *, max_length: int, seed: int = 0,
           min_length: int = 0, eos_token_ids: tuple[int, ...] = (), stop_token_ids: tuple[int, ...] = (),
           prompt_length: int = 0, adapter: str | None = None, with_top: bool = False) -> SlotRow:
        """Encode the settings of one request; the defaults are those of greedy search.

        Args:
            min_length: tokens of the whole sequence below which EOS and stop tokens are barred.
            eos_token_ids: the length penalty favours these.
            prompt_length: tokens of the prompt as given.

        Raises:
            ValueError: the tables cannot hold a number or a list; the error names the setting.
        """
        floats = float_line(FLOAT_NAMES, drawing.floats())
        ints = int_line(INT_NAMES, drawing.ints(seed, min_length))
        eos = int_line("eos_token_id, stop_token_ids", (*eos_token_ids, *stop_token_ids))
        encoded = _NEUTRAL if edits == NEUTRAL else _encoded(edits, prompt_length, max_length, eos_token_ids)
        return cls(max_length, floats, ints, eos, *encoded, adapter, drawing.is_filtered, with_top)


def _encoded(edits: Edits, prompt_length: int, max_length: int,
             eos: tuple[int, ...]) -> tuple[frozenset[str], np.ndarray, float, np.ndarray, tuple[bytes, ...]]:
    floats = float_line(", ".join(FLOATS), [read(edits) for read in FLOATS.values()])
    numbers = int_line("lengths and token ids", [read(edits, prompt_length, max_length) for read in NUMBERS.values()])
    lists = tuple(read(edits, eos).tobytes() for read in LISTS.values())
    return edits.features(), floats, float(edits.decay_factor), numbers, lists


_NEUTRAL = _encoded(NEUTRAL, 0, 0, ())
NEUTRAL_ROW = SlotRow.of(max_length=0)
