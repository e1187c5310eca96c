"""Rows of a step whose prompts feed the decoder something in place of ids, of images for instance."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.models.base import FedTokens
from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.scheduler import Sequence, StepPlan


class FedRows:
    """The slots whose sequences feed the decoder something in place of ids, and what each step needs of that."""

    def __init__(self) -> None:
        self._slots: set[int] = set()  # includes ended sequences

    def admit(self, sequences: Seq[Sequence]) -> None:
        """Note which of these sequences, which have got a slot, feed something."""
        for sequence in sequences:
            if sequence.fed is None:
                self._slots.discard(sequence.slot)
            else:
                self._slots.add(sequence.slot)

    def feeds(self, plan: StepPlan) -> bool:
        """Return whether `of` a step is not None: graphs hold no step that feeds anything."""
        return any(next(fed.parts(start, start + count), None) is not None or fed.positions is not None
                   for fed, start, count, _ in self._rows(plan))

    def of(self, plan: StepPlan, device: torch.device) -> FedTokens | None:
        """Return what the tokens of a step feed; None if ids and cache positions say it all."""
        tokens: dict[str, list[np.ndarray]] = {}
        rows: dict[str, list[torch.Tensor]] = {}
        positions: np.ndarray | None = None
        for fed, start, count, end in self._rows(plan):
            place = end - count  # of the row's first token in the step
            for first, stop, given in fed.parts(start, start + count):
                for name, part in given.items():
                    tokens.setdefault(name, []).append(np.arange(place + first - start, place + stop - start))
                    rows.setdefault(name, []).append(part)
            if (own := fed.positions_of(start, start + count)) is not None:
                if positions is None:
                    positions = np.tile(plan.token_columns()[1], (len(own), 1))
                positions[:, place:end] = own
        if not rows and positions is None:
            return None
        found = {name: (upload(np.concatenate(tokens[name]), device), torch.cat(parts)) for name, parts in rows.items()}
        return FedTokens(found, None if positions is None else upload(positions, device))

    def _rows(self, plan: StepPlan) -> Iterator[tuple[FedPrompt, int, int, int]]:
        """Yield the prompt, the first position, the number of tokens and their end in the step, of rows that feed."""
        if not self._slots or self._slots.isdisjoint(plan.slots.tolist()):
            return
        ends = np.cumsum(plan.num_new_tokens)
        for sequence, start, count, end in zip(plan.sequences, plan.start.tolist(), plan.num_new_tokens.tolist(),
                                               ends.tolist(), strict=True):
            if isinstance(sequence.fed, FedPrompt):
                yield sequence.fed, start, count, end
