"""What the decoder is fed of one prompt besides the embeddings and the plain positions of its token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

# Inputs of a decoder that have a row for each token, [B, T, ...].
EMBEDS, PER_LAYER = "inputs_embeds", "per_layer_inputs"
# What is added behind each of the first layers; a fed row holds those of all layers, [layers, hidden_size].
DEEPSTACK = "deepstack_visual_embeds"


class FedRun(NamedTuple):
    """Tokens of a prompt, one after the other, for which the decoder is fed rows that are not those of their ids.

    Attributes:
        first: position of the first token.
        identity: the number of these rows; equal rows have the same one (`FedContents`).
        rows: [n, ...] by the name of the decoder's input.
    """

    first: int
    identity: int
    rows: Mapping[str, torch.Tensor]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.first + len(self.rows[EMBEDS])


class FedPart(NamedTuple):
    """Tokens `first` to `end` - 1 of a prompt, which a run feeds, with their rows by the name of the input."""

    first: int
    end: int
    rows: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class FedPrompt:
    """What a prompt's decoder is fed in place of its ids.

    Attributes:
        runs: In order, apart from each other.
        positions: [A, T] int64, RoPE's positions of the prompt's tokens, for each axis; None: 0, 1, ... for all axes.
    """

    runs: tuple[FedRun, ...]
    positions: np.ndarray | None

    def parts(self, first: int, end: int) -> Iterator[FedPart]:
        """Yield what is fed of the tokens `first` to `end` - 1, in order."""
        for run in self.runs:
            start, stop = max(first, run.first), min(end, run.end)
            if start < stop:
                rows = {name: rows[start - run.first : stop - run.first] for name, rows in run.rows.items()}
                yield FedPart(start, stop, rows)

    def positions_of(self, first: int, end: int) -> np.ndarray | None:
        """Return RoPE's positions [A, n] of the tokens `first` to `end` - 1; None if they are `first`, `first` + 1, ...

        Behind the prompt each axis goes on from its own last position, as in stock's `generate`.
        """
        if self.positions is None:
            return None
        length = self.positions.shape[1]
        later = self.positions[:, -1:] + np.arange(max(first, length), end) - (length - 1)
        return np.concatenate([self.positions[:, first:end], later], axis=1)

    def block_key(self, first: int, end: int) -> bytes:
        """Return what keys and values of the tokens `first` to `end` - 1 depend on besides their ids and the tokens in
        front; b"" if on nothing.

        Positions count by their steps, so that the key of tokens behind the prompt is b"". The number of bytes is odd,
        unlike that of ids and cache keys, and the key says where it ends: no key is the beginning of another one.
        """
        runs = []
        for run in self.runs:
            start, stop = max(first, run.first), min(end, run.end)
            if start < stop:
                runs.append((run.identity, start - run.first, start - first, stop - start))
        steps = self._steps(first, end)
        if not runs and steps is None:
            return b""
        head = np.array([len(runs), 0 if steps is None else len(steps), *(n for run in runs for n in run)], np.int64)
        return head.tobytes() + (b"" if steps is None else steps.tobytes()) + b"\0"

    def _steps(self, first: int, end: int) -> np.ndarray | None:
        """Return by how much the position of each token is above that of the token before [A, n]; None if by 1."""
        found = self.positions_of(max(first - 1, 0), end)
        if found is None:
            return None
        steps = np.diff(found, axis=1) if first else np.diff(found, axis=1, prepend=-1)
        return None if (steps == 1).all() else steps
