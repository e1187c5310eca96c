"""Rows with edits of their own: settings as transformers names them, and what its own processors make of the scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.edits import EditState, sample_edited
from hf_paged.sampling.sampler import SamplingRows, derive_seed
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.table import SamplingTable

DRAWN = {"do_sample": True, "top_k": 0}


def penalised_by_count(tokens: list[int], scores: torch.Tensor, presence: float, frequency: float) -> torch.Tensor:
    """OpenAI's definition, in numpy: ``mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence``.

    Args:
        tokens: those that were generated.
        scores: float32 [V].
    """
    inside = [token for token in tokens if token < len(scores)]
    counts = np.bincount(np.array(inside, dtype=np.int64), minlength=len(scores)).astype(np.float32)
    penalised = scores.numpy() - counts * np.float32(frequency)
    return torch.from_numpy(penalised - (counts > 0).astype(np.float32) * np.float32(presence))


@dataclass
class Row:
    """A sequence, and the keyword arguments of a GenerationConfig."""

    tokens: list[int]
    prompt_length: int
    settings: dict = field(default_factory=dict)
    eos: tuple[int, ...] = (1,)
    max_length: int = 1000
    seed: int = 7

    @cached_property
    def edits(self) -> Edits:
        s = self.settings
        single = [[token] for token in self.eos]
        start, factor = s.get("exponential_decay_length_penalty") or (None, 1.0)
        forced = s.get("forced_eos_token_id", ())
        drawn = s.get("do_sample", False)
        return Edits(
            repetition_penalty=s.get("repetition_penalty", 1.0),
            presence_penalty=s.get("presence_penalty", 0.0), frequency_penalty=s.get("frequency_penalty", 0.0),
            no_repeat_ngram_size=s.get("no_repeat_ngram_size", 0),
            sequence_bias=tuple((tuple(sequence), bias) for sequence, bias in s.get("sequence_bias", ())),
            bad_words_ids=tuple(tuple(word) for word in s.get("bad_words_ids", ()) if word not in single),
            forced_bos_token_id=s.get("forced_bos_token_id"),
            forced_eos_token_ids=(forced,) if isinstance(forced, int) else tuple(forced),
            remove_invalid_values=s.get("remove_invalid_values", False),
            decay_start=start, decay_factor=factor,
            suppress_tokens=tuple(s.get("suppress_tokens", ())),
            begin_suppress_tokens=tuple(s.get("begin_suppress_tokens", ())),
            typical_p=s.get("typical_p", 1.0) if drawn else 1.0,
            epsilon_cutoff=s.get("epsilon_cutoff", 0.0) if drawn else 0.0,
            eta_cutoff=s.get("eta_cutoff", 0.0) if drawn else 0.0,
            renormalize_logits=s.get("renormalize_logits", False),
        )

    def stock(self, scores: torch.Tensor) -> torch.Tensor:
        """Float32 scores [V] after every processor that stock generate lists for this row, and penalties by count."""
        config = GenerationConfig(max_length=self.max_length)
        for name, value in self.settings.items():  # not checked against each other
            if name == "sequence_bias" and any(0 in sequence for sequence, _ in value):
                value = {tuple(sequence): bias for sequence, bias in value}  # transformers 5.17 refuses 0 in a list
            setattr(config, name, value)
        config._eos_token_tensor = torch.tensor(self.eos)
        model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
        model._merge_criteria_processor_list = partial(GenerationMixin._merge_criteria_processor_list, model)
        processors = GenerationMixin._get_logits_processor(model, config, self.prompt_length)
        counted = [self.settings.get(name, 0.0) for name in ("presence_penalty", "frequency_penalty")]
        if any(counted):  # behind the repetition penalty, as in vLLM
            first = sum(isinstance(p, (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor))
                        and not isinstance(p, NoBadWordsLogitsProcessor) for p in processors)
            generated = self.tokens[self.prompt_length :]
            processors.insert(first, lambda ids, scores: penalised_by_count(generated, scores[0], *counted)[None])
        return processors(torch.tensor([self.tokens]), scores[None].float())[0]


def row_of(edits: Edits, prompt_length: int, max_length: int, eos: tuple[int, ...]) -> SlotRow:
    """A greedy request with these edits, as the device has it."""
    return SlotRow.of(edits=edits, prompt_length=prompt_length, max_length=max_length, eos_token_ids=eos)


class Batch:
    """Rows in shuffled slots of a state; lines of other slots hold what no row may read."""

    def __init__(self, rows: list[Row], device: str = "cpu", seed: int = 0, capacity: int = 64, spare: int = 2) -> None:
        self.rows, self.device = rows, device
        count = len(rows) + spare
        g = torch.Generator().manual_seed(seed)
        self.slots = torch.randperm(count, generator=g)[: len(rows)].to(device)
        self.position = torch.tensor([len(row.tokens) for row in rows], device=device)
        history = torch.full((count + 1, capacity), 3, dtype=torch.int32)
        floats, ints = torch.full((count + 1, 3), torch.nan), torch.full((count + 1, 3), -5)
        eos = torch.full((count + 1, 3), -1)
        floats[count], ints[count] = 0.0, 0
        for slot, row in zip(self.slots.tolist(), rows, strict=True):
            s = row.settings
            history[slot, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
            temperature = s.get("temperature", 1.0) if s.get("do_sample") else 0.0
            floats[slot] = torch.tensor([temperature, 1.0 - s.get("top_p", 1.0), s.get("min_p", 0.0)])
            least = max(s.get("min_length", 0), row.prompt_length + s["min_new_tokens"] if "min_new_tokens" in s else 0)
            ints[slot] = torch.tensor([row.seed, s.get("top_k", 0), least])
            eos[slot, : len(row.eos)] = torch.tensor(row.eos)
        self.history = history.to(device)
        self.sampling = SamplingTable(floats.to(device), ints.to(device), eos.to(device))
        self.state = EditState(count, torch.device(device))
        self.put()

    def put(self) -> None:
        lines = [row_of(row.edits, row.prompt_length, row.max_length, row.eos) for row in self.rows]
        self.state.put(self.slots.cpu().numpy().astype(np.int64), lines)

    @property
    def features(self) -> frozenset[str]:
        return frozenset().union(*(row.edits.features() for row in self.rows))

    @property
    def arguments(self) -> tuple:
        """Of the functions that make scores, after the logits."""
        return self.sampling, self.state.table, self.slots, self.position, self.history, self.features

    def sampling_rows(self) -> SamplingRows:
        return SamplingRows.of(self.sampling, self.slots, self.position)

    def sample(self, logits: torch.Tensor, **options) -> torch.Tensor:
        return sample_edited(
            logits, self.sampling, self.state, self.slots, self.position, self.history, self.features, **options
        )


def random_rows(seed: int, count: int, vocab_size: int, settings: list[dict], longest: int = 24) -> list[Row]:
    """Sequences of few different tokens, so that all stages find something to do."""
    g = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(g.integers(1, longest))
        tokens = g.integers(0, min(vocab_size, int(g.integers(2, 12))), length).tolist()
        rows.append(Row(tokens, int(g.integers(1, length + 1)), settings[number % len(settings)],
                        seed=derive_seed(seed, number)))
    return rows


def random_logits(seed: int, rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
