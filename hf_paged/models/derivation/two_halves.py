"""Check on a clone that a native step's two forwards, of the body and of the head, give the class's own logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.derivation.layout import body_of, watched_forwards
from hf_paged.models.executor import class_logits, final_states
from hf_paged.models.proof.clone import Double, NoRandomness, clone_of
from hf_paged.models.proof.interface import answered_by, embeddings_of
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.stock import WatchedCache, forward
from hf_paged.models.proof.subject import TOLERANCE, CausalAttention, distance
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent.view import keeps_states, recorder

TOKENS = 13
WANTED = (4, 0, 12, 7)  # of a step's tokens, those that get logits


class CloneTraits(NamedTuple):
    """Properties of a clone: as `Layout` names them."""

    has_stock_cache: bool
    ignores_train_mode: bool


def check_two_halves(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> CloneTraits:
    """Raise `Refused` if the halves give other logits; return what else the forwards showed."""
    with Double(), torch.no_grad():
        model = clone_of(cls, reduced(config), attention)
        tokens = torch.arange(TOKENS) % len(embeddings_of(model))
        spy, cache = CausalAttention(), WatchedCache(model)
        with answered_by(model, spy), watched_forwards(model) as seen:
            logits = forward(model, tokens.tolist(), 0, cache)
            body = body_of(seen.entered, [path for path in map(paths_of(model).get, spy.modules) if path])
            states = recorder() if keeps_states(model.config) else None
            has_stock_cache = states is None and _holds_given(cache, spy)
            hidden = final_states(model.get_submodule(body), tokens, torch.arange(TOKENS), states)
        halves = class_logits(model, cls, body, hidden[list(WANTED)])
        ignores_train_mode = _ignores_train_mode(model, tokens.tolist())
    if (worst := distance(halves, logits[list(WANTED)])) >= TOLERANCE:
        raise Refused(f"logits of the final hidden states of {body} differ from the class's by {worst:.1e} of their "
                      "standard deviation")
    return CloneTraits(has_stock_cache, ignores_train_mode)


def _ignores_train_mode(model: PreTrainedModel, tokens: list[int]) -> bool:
    """Return whether a forward in train mode draws no random numbers and gives the logits of eval mode."""
    logits = forward(model, tokens)
    model.train()
    try:
        with NoRandomness():
            return torch.equal(forward(model, tokens), logits)
    except Exception:
        return False
    finally:
        model.eval()


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _holds_given(cache: WatchedCache, spy: CausalAttention) -> bool:
    """Return whether a cache holds the keys and values of all attention calls, layer by layer."""
    held = [(entry.keys, entry.values) for entry in cache.entries]
    alike = len(held) == len(spy.given) and all(
        torch.equal(one, other) for pair, given in zip(held, spy.given, strict=True)
        for one, other in zip(pair, given, strict=True))
    return alike and [entry.layer for entry in cache.entries] == list(range(len(held)))
