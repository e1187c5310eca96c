"""Rows of a step whose prompts feed the decoder something in place of ids, of images for instance."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels.attention.reference import Pages
from hf_paged.models.base import FedTokens, SeenRow
from hf_paged.models.images.fed_prompt import FedPrompt, plain_sight
from hf_paged.scheduler import Sequence, StepPlan


class FedRows:
    """The slots whose sequences feed the decoder something in place of ids, and what each step needs of that."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: set[int] = set()  # includes ended sequences
        self._lengths = np.zeros(1, np.int64)  # of what prompts feed, by slot; 0 for other slots, and at the end

    def admit(self, sequences: Seq[Sequence]) -> None:
        """Note which of these sequences, which have got a slot, feed something."""
        for sequence in sequences:
            if sequence.fed is None:
                self._slots.discard(sequence.slot)
            else:
                self._slots.add(sequence.slot)
            if sequence.slot + 1 >= len(self._lengths):
                self._lengths = np.pad(self._lengths, (0, sequence.slot + 1))
            self._lengths[sequence.slot] = len(sequence.fed.ids) if isinstance(sequence.fed, FedPrompt) else 0

    def feeds(self, plan: StepPlan) -> bool:
        """Return whether a step feeds more than positions of decode rows, which are all that graphs feed."""
        is_decode = plan.num_decode_rows == len(plan.slots)
        if is_decode and (plan.start >= self._lengths.take(plan.slots, mode="clip")).all():
            return False  # without looking at each sequence
        return any(start < len(fed.ids) or (fed.positions is not None and not is_decode)
                   for _, fed, start, _, _ in self._rows(plan))

    def of(self, plan: StepPlan, device: torch.device) -> FedTokens | None:
        """Return what the tokens of a step feed; None if ids and cache positions say it all."""
        tokens: dict[str, list[np.ndarray]] = {}
        rows: dict[str, list[torch.Tensor]] = {}
        positions: np.ndarray | None = None
        seen: list[SeenRow] = []
        for sequence, fed, start, count, place in self._rows(plan):
            for first, stop, given in fed.parts(start, start + count):
                for name, part in given.items():
                    tokens.setdefault(name, []).append(np.arange(place + first - start, place + stop - start))
                    rows.setdefault(name, []).append(part)
            if (own := fed.positions_of(start, start + count)) is not None:
                if positions is None:
                    positions = np.tile(plan.token_columns()[1], (len(own), 1))
                positions[:, place : place + count] = own
            if fed.sights and (row := self._seen(sequence, fed, start, count, place, device)) is not None:
                seen.append(row)
        if not rows and positions is None and not seen:
            return None
        found = {name: (upload(np.concatenate(tokens[name]), device), torch.cat([
            part.to(device, non_blocking=True) for part in parts])) for name, parts in rows.items()}
        return FedTokens(found, None if positions is None else upload(positions, device), seen)

    def _rows(self, plan: StepPlan) -> Iterator[tuple[Sequence, FedPrompt, int, int, int]]:
        """Yield each sequence that feeds, its prompt, its first position, its number of tokens and their place in the
        step."""
        if not self._slots or self._slots.isdisjoint(plan.slots.tolist()):
            return
        places = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        for sequence, start, count, place in zip(plan.sequences, plan.start.tolist(), plan.num_new_tokens.tolist(),
                                                 places.tolist(), strict=True):
            if isinstance(sequence.fed, FedPrompt):
                yield sequence, sequence.fed, start, count, place

    def _seen(self, sequence: Sequence, fed: FedPrompt, start: int, count: int, place: int,
              device: torch.device) -> SeenRow | None:
        """Return what tokens of a row see if some see others than without images."""
        stop, masks = min(start + count, len(fed.ids)), {}
        for window, sight in fed.sights.items():
            first, last = sight[:, start:stop]
            if not np.array_equal((first, last), plain_sight(stop, window)[:, start:]):
                at = np.arange(start + count)
                masks[window] = upload((first[:, None] <= at) & (at <= last[:, None]), device)
        if not masks:
            return None
        blocks = np.array(sequence.block_table[: -(-(start + count) // self._block_size)], np.int64)
        return SeenRow(place, place + stop - start, Pages(upload(blocks, device), 0, start + count), masks)
