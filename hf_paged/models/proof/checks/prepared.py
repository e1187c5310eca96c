"""Check: stock's `generate` hands forwards all tokens in order, or the next one behind its cache, at any length."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.models.proof.checks.far import FARTHEST
from hf_paged.models.proof.interface import embeddings_of
from hf_paged.models.proof.line_counts import LineCounts
from hf_paged.models.proof.stock import cache_argument, generate
from hf_paged.models.proof.subject import Subject

_BEFORE, _STEPS = 3, 7  # tokens of a prompt in front of a length, and steps from there on
_LEAST = 128  # tokens: a class with a lower limit is not run


def count_preparing(subject: Subject, lengths: list[int], max_length: int | None, lines: LineCounts) -> int | None:
    """Run `generate` across each of the sorted lengths, with forwards that compute nothing, and return up to how many
    tokens, at most `max_length` (None: any number), each forward got what the class's other forwards get.

    The lines that ran are added to `lines`, but for a class whose forwards get something else of few tokens.
    """
    model: Any = subject.model
    name = cache_argument(model)
    own = inspect.unwrap(type(model).prepare_inputs_for_generation)
    if subject.states or name is None or own is inspect.unwrap(GenerationMixin.prepare_inputs_for_generation):
        return max_length
    ran = LineCounts(lines.files)
    forwards = _Forwards(model, name, max_length)
    model.forward = forwards.forward
    try:
        with ran.counting():
            for length in (one for one in lengths if _BEFORE < one <= FARTHEST):
                for begin in (length - _BEFORE, length + 1):  # across the length, and from a prompt beyond it
                    prompt = [at % 110 + 3 for at in range(begin)]
                    forwards.row = torch.tensor([prompt + [0] * _STEPS])  # of logits that are all alike
                    forwards.total = begin - 1
                    generate(model, [prompt], _STEPS)
    except Exception:
        return max_length
    finally:
        del model.forward
    if forwards.max_length is not None and forwards.max_length < _LEAST:
        return max_length
    lines.add(ran)
    return forwards.max_length


class _Forwards:
    """Forwards of `generate` that compute nothing: they fill the cache, and look at what they get."""

    def __init__(self, model: PreTrainedModel, cache_name: str, max_length: int | None) -> None:
        self.row, self.total = torch.empty(0, dtype=torch.long), 0  # tokens, and how many of them there are by now
        self._config: Any = model.config.get_text_config(decoder=True)
        self._vocabulary = len(embeddings_of(model))
        self._cache_name, self.max_length = cache_name, max_length
        self.forward = functools.wraps(type(model).forward)(lambda *args, **kwargs: self._forward(*args, **kwargs))

    def _forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
                 position_ids: torch.Tensor | None = None, **others: Any) -> CausalLMOutputWithPast:
        cache = others.pop(self._cache_name, None)
        if cache is None:
            cache = DynamicCache(config=self._config)
        first, tokens = cache.get_seq_length(), input_ids.shape[1]
        self.total += 1
        if self.max_length is None or self.total <= self.max_length:
            at = torch.arange(first, first + tokens)
            is_usual = (
                first + tokens == self.total and torch.equal(input_ids, self.row[:, at])
                and (position_ids is None or torch.equal(position_ids, at[None]))
                and (attention_mask is None or torch.equal(attention_mask, torch.ones(1, first + tokens).long()))
                and not any(isinstance(value, torch.Tensor) and value.dim() for value in others.values()))
            if not is_usual:
                self.max_length = self.total - 2
        for layer in range(self._config.num_hidden_layers):
            cache.update(torch.zeros(1, 1, tokens, 1), torch.zeros(1, 1, tokens, 1), layer)
        return CausalLMOutputWithPast(logits=torch.zeros(1, 1, self._vocabulary), **{self._cache_name: cache})
