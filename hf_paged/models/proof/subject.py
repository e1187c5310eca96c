"""The clone that a proof's checks look at, with the prompts that they run and stock's logits of each prompt alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.models.base import StateKey
from hf_paged.models.proof.calls import AttentionRecord, Recorder
from hf_paged.models.proof.clone import NoRandomness
from hf_paged.models.proof.interface import answered_by, embeddings_of
from hf_paged.models.proof.mask_kinds import FULL, MaskKind
from hf_paged.models.proof.packed import PackedSteps, RecurrentSteps, Row, attend
from hf_paged.models.proof.reduced import VOCABULARY
from hf_paged.models.proof.stock import cache_argument, forward
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent import view

TOLERANCE = 1e-8  # of the standard deviation of logits
LENGTHS = (1, 5, 19, 33)  # of prompts, before one with every token id


@dataclass
class Subject:
    """A clone, its attention calls and its prompts."""

    model: PreTrainedModel
    attention: str
    prompts: list[list[int]]
    alone: list[torch.Tensor]  # stock's logits [T, V] of each prompt
    calls: list[AttentionRecord]
    states: dict[StateKey, torch.Tensor]  # [1, ...] each, behind a prompt; {}: the class keeps none
    whole_prompts: bool = False  # steps compute a prompt's chunk with all that is in front of it

    def steps(self, blocks: int = 64, unread: frozenset[Row] = frozenset()) -> PackedSteps:
        """Return an empty cache for packed steps; stock's sdpa ignores softcaps, and so do these steps."""
        caps = self.attention != "sdpa"
        if self.states:
            return RecurrentSteps(self.model, self.calls, blocks, self.states, softcap=caps, unread=unread,
                                  whole_prompts=self.whole_prompts)
        return PackedSteps(self.model, self.calls, blocks, softcap=caps, unread=unread)


def subject_of(model: PreTrainedModel, attention: str, farthest: int) -> Subject:
    """Record a clone's attention calls and stock's logits; may raise `Refused`."""
    prompts = _prompts(len(embeddings_of(model)))
    recorder, states = Recorder(model, farthest, attend_batch), view.recorder()
    options: dict[str, Any] = {"use_cache": False}
    if (name := cache_argument(model)) is not None and view.keeps_states(model.config):
        options = {name: states, "use_cache": True}
    with answered_by(model, recorder) as recorder.masks, NoRandomness(), torch.no_grad():
        recorded = model(input_ids=torch.tensor([prompts[3]]), position_ids=torch.arange(LENGTHS[3])[None],
                         return_dict=True, **options).logits[0]
    if not recorder.calls and not states.held:
        raise Refused("no module calls the attention interface of transformers")
    alone = [forward(model, prompt) for prompt in prompts]
    subject = Subject(model, attention, prompts, alone, recorder.calls, states.held)
    if not torch.equal(forward(model, prompts[3]), subject.alone[3]) or not torch.isfinite(recorded).all():
        raise Refused("stock's forward of the same tokens gives other logits the second time")
    return subject


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two tensors of logits, in standard deviations of the wanted ones."""
    if got.shape != wanted.shape:
        return float("inf")
    worst = (got.double() - wanted.double()).abs().max() / wanted.double().std().clamp_min(1e-12)
    return float(worst) if torch.isfinite(worst) else float("inf")


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 120, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*prompts, torch.randperm(min(vocabulary, VOCABULARY), generator=generator).tolist()]


def attend_batch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: MaskKind, scaling: float | None,
                 softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return [1, T, H, D] of a row with keys and values [1, H, S, D], whose last T tokens have queries [1, H, T, D]."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    at = torch.arange(len(key))
    query_at = at[len(key) - len(query) :]
    return attend(query, key, value, query_at, at, mask, scaling, softcap, sinks)[None].contiguous()


class CausalAttention:
    """Attention engine over full causal masks, which keeps what each call is given."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, scaling: float | None = None, softcap: float | None = None,
                 s_aux: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        self.modules.append(module)
        self.given.append((key, value))
        return attend_batch(query, key, value, FULL, scaling, softcap, s_aux)
