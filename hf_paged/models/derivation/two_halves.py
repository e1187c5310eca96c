"""Check on a clone that a native step's two forwards, of the body and of the head, give the class's own logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.derivation.layout import body_of, watched_forwards
from hf_paged.models.executor import class_logits, final_states
from hf_paged.models.proof.clone import Double, clone_of
from hf_paged.models.proof.interface import answered_by, embeddings_of
from hf_paged.models.proof.mask_kinds import FULL
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.stock import WatchedCache, forward
from hf_paged.models.proof.subject import TOLERANCE, attend_batch, distance
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent.view import keeps_states, recorder

_TOKENS = 13
_WANTED = (4, 0, 12, 7)  # of a step's tokens, those that get logits


def check_two_halves(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> bool:
    """Raise `Refused` if the halves give other logits; return whether stock's cache holds what attention gets."""
    with Double(), torch.no_grad():
        model = clone_of(cls, reduced(config), attention)
        tokens = torch.arange(_TOKENS) % len(embeddings_of(model))
        spy, cache = _CausalAttention(), WatchedCache(model)
        with answered_by(model, spy), watched_forwards(model) as seen:
            logits = forward(model, tokens.tolist(), 0, cache)
            body = body_of(seen.entered, [path for path in map(_paths(model).get, spy.modules) if path])
            states = recorder() if keeps_states(model.config) else None
            has_stock_cache = states is None and _holds_given(cache, spy)
            hidden = final_states(model.get_submodule(body), tokens, torch.arange(_TOKENS), states)
        halves = class_logits(model, cls, body, hidden[list(_WANTED)])
    if (worst := distance(halves, logits[list(_WANTED)])) >= TOLERANCE:
        raise Refused(f"logits of the final hidden states of {body} differ from the class's by {worst:.1e} of their "
                      "standard deviation")
    return has_stock_cache


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _holds_given(cache: WatchedCache, spy: _CausalAttention) -> bool:
    """Return whether a cache holds the keys and values of all attention calls, layer by layer."""
    held = [(entry.keys, entry.values) for entry in cache.entries]
    alike = len(held) == len(spy.given) and all(
        torch.equal(one, other) for pair, given in zip(held, spy.given, strict=True)
        for one, other in zip(pair, given, strict=True))
    return alike and [entry.layer for entry in cache.entries] == list(range(len(held)))


class _CausalAttention:
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
