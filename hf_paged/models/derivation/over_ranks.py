"""Checks that a model whose layers are cut over ranks computes what the whole model does."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.errors import UnsupportedModelError
from hf_paged.models.derivation.layout import Layout, body_of, lay_out, watched_forwards
from hf_paged.models.derivation.two_halves import TOKENS, WANTED, paths_of
from hf_paged.models.executor import class_logits, final_states
from hf_paged.models.proof.clone import Double, clone_of
from hf_paged.models.proof.interface import ProofThread, answered_by, embeddings_of
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.stock import forward
from hf_paged.models.proof.subject import TOLERANCE, CausalAttention, distance
from hf_paged.models.proof.verdict import Refused
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import Sharded, local_kv_heads
from hf_paged.parallel.plan import cut

_LONGEST_WAIT_S = 60.0  # of a rank for the others


def part_of(whole: Layout, cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str,
            num_ranks: int) -> Layout:
    """Return the layout of a rank's part of models of this class and config, which is the same on all ranks.

    Raises:
        Refused: the ranks together do not compute what the whole model does.
    """
    try:
        part = lay_out(cls, config, num_ranks)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"a rank's part does not run ({type(error).__name__}: {str(error)[:160]})") from error
    _check_part(whole, part, num_ranks)
    _check_clone(cls, config, attention, shares_heads=any(call.num_kv_heads % num_ranks for call in whole.calls))
    return replace(part, has_stock_cache=whole.has_stock_cache, ignores_train_mode=whole.ignores_train_mode)


def _check_part(whole: Layout, part: Layout, num_ranks: int) -> None:
    """Raise `Refused` if a rank's attention calls are neither those of the whole model nor those of its heads."""
    if [call.module for call in part.calls] != [call.module for call in whole.calls]:
        raise Refused("a rank's part attends in other modules than the whole model")
    for call, own in zip(whole.calls, part.calls, strict=True):
        divided = call._replace(num_heads=call.num_heads // num_ranks,
                                num_kv_heads=local_kv_heads(call.num_kv_heads, num_ranks))
        if own not in (call, divided):
            raise Refused(f"{call.module} attends by {own.num_heads} and {own.num_kv_heads} heads of queries and keys "
                          f"on a rank of {num_ranks}, and by {call.num_heads} and {call.num_kv_heads} in the whole "
                          "model")
    if part.num_logits != whole.num_logits:
        raise Refused(f"a rank makes {part.num_logits} logits, and the whole model {whole.num_logits}")


def _check_clone(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str, *, shares_heads: bool) -> None:
    """Raise `Refused` if a clone's ranks, as threads, give other logits than the clone.

    ``shares_heads``: whether several ranks of the model hold the same head of keys.
    """
    with Double(), torch.no_grad():
        model: Any = clone_of(cls, reduced(config), attention)
        tokens = torch.arange(TOKENS) % len(embeddings_of(model))
        spy = CausalAttention()
        with answered_by(model, spy), watched_forwards(model) as seen:
            logits = forward(model, tokens.tolist(), 0)[list(WANTED)]
    body = body_of(seen.entered, [path for path in map(paths_of(model).get, spy.modules) if path])
    has_several = any(key.shape[1] > 1 for key, _ in spy.given)
    meeting = _Meeting(4 if shares_heads and has_several else 2)
    try:
        parts = [_part_of(model, _Rank(rank, meeting)) for rank in range(meeting.size)]
    except (UnsupportedModelError, ValueError) as error:
        raise Refused(f"a small clone cannot be cut over {meeting.size} ranks: {error}") from error

    def run(part: Any) -> torch.Tensor:
        with Double(), torch.no_grad(), answered_by(part, CausalAttention()):
            hidden = final_states(part.get_submodule(body), tokens, torch.arange(TOKENS))
            columns = class_logits(part, cls, body, hidden[list(WANTED)])
            gathered: torch.Tensor = part.get_output_embeddings().gathered(columns)
            return gathered

    for found in meeting.results(run, parts):
        if (worst := distance(found, logits)) >= TOLERANCE:
            raise Refused(f"logits of a small clone over {meeting.size} ranks differ from the whole clone's by "
                          f"{worst:.1e} of their standard deviation")


def _part_of(whole: nn.Module, group: ParallelGroup) -> nn.Module:
    """Return a rank's part of a model, with its part of the model's weights."""
    part: Any = copy.deepcopy(whole)
    cut(part, group)
    modules = dict(whole.named_modules())
    for path, module in part.named_modules():
        if isinstance(module, Sharded):
            for key, parameter in module._parameters.items():  # type: ignore[attr-defined]
                if parameter is not None:
                    parameter.data.copy_(module.shards[key].take(getattr(modules[path], key).data))
    return part


class _Meeting:
    """Threads of this process that are the ranks of a clone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=_LONGEST_WAIT_S)

    def exchange(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, by rank."""
        self._given[rank] = tensor
        self._barrier.wait()
        every = torch.stack(self._given)
        self._barrier.wait()  # before the next exchange
        return every

    def results(self, run: Any, parts: list[nn.Module]) -> list[torch.Tensor]:
        """Run each part in a thread of its own; raises the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = run(parts[rank])
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [ProofThread(lambda rank=rank: work(rank)) for rank in range(self.size)]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise Refused(f"a small clone does not run over {self.size} ranks ({type(errors[0]).__name__}: "
                          f"{str(errors[0])[:160]})") from errors[0]
        return results


class _Rank(ParallelGroup):
    """A rank of a clone."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self.rank, tensor).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self.rank, tensor)
