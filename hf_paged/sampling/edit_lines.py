"""Settings of any length (lists of tokens, rules) on the device; slots with equal settings share a line of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from hf_paged.device.cuda import upload

# Limits a line to 1 MiB, so that one request's list cannot exhaust the device's memory.
MOST_NUMBERS = 1 << 18
# What one table holds before it moves, 1 MiB: settings of so many requests at once, and numbers of a setting. As many
# biases of tokens as OpenAI's API takes, 300, are 2,101 numbers.
_FIRST_LINES, _FIRST_WIDTH = 64, 4096
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = np.zeros(1, dtype=np.int32).tobytes()


class SharedLines:
    """``table`` [lines, width] int32: one line per distinct setting, written once; line 0 is empty.

    A line's numbers say how many they are; what follows them is arbitrary.

    Settings are encoded (`encode_tokens`, `encode_rules`, `encode_bars`), as bytes. A line without a slot keeps its
    setting until another setting needs the line.
    """

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(_FIRST_LINES, _FIRST_WIDTH, dtype=torch.int32, device=device)
        self.moves = 0  # number of reallocations of the table
        self.forget()

    def forget(self) -> None:
        """Remove all settings but the empty one; the table is not reallocated."""
        self._line_of: dict[bytes, int] = {_NOTHING: 0}
        self._settings: list[bytes] = [_NOTHING]
        self._users = [1]  # line 0 is never free
        self._used_by: dict[int, int] = {}

    def assign(self, slots: list[int], settings: list[bytes]) -> list[int]:
        """Give slots new settings and return the lines of these settings."""
        for slot in slots:
            line = self._used_by.pop(slot, None)
            if line is not None:
                self._users[line] -= 1
        fresh, lines = [], []
        for slot, setting in zip(slots, settings, strict=True):
            line = self._line_of.get(setting)
            if line is None:
                line = self._take(setting)
                fresh.append(line)
            if line:
                self._users[line] += 1
                self._used_by[slot] = line
            lines.append(line)
        if fresh:
            self._write(fresh)
        return lines

    def _take(self, setting: bytes) -> int:
        if 0 in self._users:
            line = self._users.index(0)
            del self._line_of[self._settings[line]]
        else:
            line = len(self._users)
            self._users.append(0)
            self._settings.append(_NOTHING)
        self._line_of[setting], self._settings[line] = line, setting
        return line

    def _write(self, lines: list[int]) -> None:
        rows = [np.frombuffer(self._settings[line], dtype=np.int32) for line in lines]
        width = max(len(row) for row in rows)
        self._reserve(len(self._users), width)
        block = np.zeros((len(rows), width), dtype=np.int32)
        for place, row in zip(block, rows, strict=True):
            place[: len(row)] = row
        device = self.table.device
        self.table[upload(np.array(lines, dtype=np.int64), device), :width] = upload(block, device)

    def _reserve(self, lines: int, width: int) -> None:
        old = self.table
        lines = len(old) if lines <= len(old) else max(2 * len(old), lines)
        width = old.shape[1] if width <= old.shape[1] else max(2 * old.shape[1], width)
        if (lines, width) != old.shape:
            self.moves += 1
            self.table = torch.zeros(lines, width, dtype=torch.int32, device=old.device)
            self.table[: len(old), : old.shape[1]] = old


def int_line(name: str, values: Sequence[int], dtype: type = np.int64) -> np.ndarray:
    """Return ``values`` [N] as `dtype`; raises ValueError if a value does not fit or a line cannot hold so many."""
    if len(values) > MOST_NUMBERS:
        raise ValueError(f"{name}: {len(values)} numbers, expected at most {MOST_NUMBERS}")
    try:
        return np.array(values, dtype=dtype)
    except OverflowError as error:
        bits = np.iinfo(dtype).bits
        raise ValueError(f"{name}={tuple(values)!r:.200}: expected integers that {bits} bits hold") from error


def float_line(name: str, values: Sequence[float]) -> np.ndarray:
    """Return ``values`` [N] as float32; raises ValueError for NaN and for a finite number beyond float32."""
    if not all(abs(value) <= _LARGEST or math.isinf(value) for value in values):
        raise ValueError(f"{name}={tuple(values)!r:.200}: expected numbers that float32 holds")
    return np.array(values, dtype=np.float32)


def encode_tokens(tokens: tuple[int, ...]) -> np.ndarray:
    """Encode a list of tokens as a line of `EditTable.lists`, int32; raises ValueError like `int_line`."""
    return int_line("token ids", (len(tokens), *tokens), np.int32)


def encode_rules(rules: tuple[tuple[tuple[int, ...], float], ...]) -> np.ndarray:
    """Encode biases of sequences as a line of `EditTable.lists`, int32; of equal sequences the last counts, as in
    stock.

    Rules of a target keep the order of stock's additions, on which rounding depends.
    """
    unique = dict(rules)
    fills_context = stock_matches_whole_context()
    by_length: dict[int, int] = {}
    for sequence in unique:
        by_length.setdefault(len(sequence), len(by_length) if fills_context else 0)
    by_length[1] = -1
    targets: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for sequence in sorted(unique, key=lambda tokens: by_length[len(tokens)]):
        targets.setdefault(sequence[-1], []).append((sequence[:-1], unique[sequence]))

    rule_at = 1 + 3 * len(targets)
    prefix_at = rule_at + 4 * len(unique)
    head, body, prefixes = [len(targets)], list[int](), list[int]()
    for token, ends in targets.items():
        head += [token, rule_at, rule_at + 4 * len(ends)]
        rule_at += 4 * len(ends)
        for prefix, bias in ends:
            least = len(prefix) + (bool(prefix) and not fills_context)
            bits = int(float_line("sequence_bias", (bias,)).view(np.int32)[0])
            body += [prefix_at + len(prefixes), len(prefix), least, bits]
            prefixes += prefix
    return int_line("sequence_bias, bad_words_ids", head + body + prefixes, np.int32)


def encode_bars(sequences: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Encode sequences that must not be completed; like stock, as rules with a bias of -inf."""
    return encode_rules(tuple((sequence, -np.inf) for sequence in sequences))


@cache
def stock_matches_whole_context() -> bool:
    """Return whether stock biases a sequence whose beginning is the whole context (transformers 5.23 does, 5.17 not).

    A release that does also adds biases up by length of sequence.
    """
    from transformers import SequenceBiasLogitsProcessor

    processor = SequenceBiasLogitsProcessor([[[1, 1], 1.0]])
    scores = torch.zeros(1, 2, dtype=torch.float32, device="cpu")
    return bool(processor(_one_token(), scores).any())


@cache
def stock_decays_finite_only() -> bool:
    """Return whether stock's length penalty skips a barred EOS (transformers 5.23 does; 5.17 makes it NaN)."""
    from transformers import ExponentialDecayLengthPenalty

    processor = ExponentialDecayLengthPenalty((0, 2.0), torch.zeros(1, dtype=torch.int64, device="cpu"), 0)
    barred = torch.full((1, 2), -torch.inf, dtype=torch.float32, device="cpu")
    return not bool(processor(_one_token(), barred).isnan().any())


def _one_token() -> torch.Tensor:
    return torch.ones(1, 1, dtype=torch.int64, device="cpu")
