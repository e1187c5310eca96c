"""What the ranks of test_derived_over_ranks.py run: a model of a derived class, beside the whole model in stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from derived_models import derived_model
from support import random_prompts
from transformers import GenerationConfig

import hf_paged
from hf_paged.errors import UnsupportedModelError
from hf_paged.models import check_over_ranks
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.loading import load

PROMPTS = random_prompts([30, 9, 17])
NEW_TOKENS = 8


def compare_with_stock(group: ParallelGroup, cases: list[tuple[str, dict[str, Any]]], folder: str) -> list[Any]:
    """Of each class: whether this rank's tokens and log-probabilities are stock's, and its heads; or why it is refused.
    """
    found = []
    for i, (name, settings) in enumerate(cases):
        whole, path = derived_model(name, settings), Path(folder, str(i))
        if group.rank == 0:
            whole.save_pretrained(path)
        torch.distributed.barrier()
        try:
            found.append(_compare(load(str(path), group, device="cpu", check_class=check_over_ranks), whole))
        except UnsupportedModelError as error:
            found.append(str(error))
    return found


@torch.no_grad()
def _compare(sharded: Any, whole: Any) -> tuple[bool, bool, tuple[int, int]]:
    hf_paged.enable(sharded, num_blocks=64, max_num_batched_tokens=19, max_num_seqs=6, strict=True)
    engine, completions = hf_paged.get_engine(sharded), []
    for prompt in PROMPTS:
        engine.add_request(prompt, GenerationConfig(max_new_tokens=NEW_TOKENS), logprobs=True, prompt_logprobs=True)
    while engine.has_unfinished():
        completions += [output.completion for output in engine.step() if output.completion]
    tokens, is_close = [], True
    for completion in completions:
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        known = whole(ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0].float().log_softmax(-1)
        expected = known[:-1].gather(1, ids[0, 1:, None])[:, 0]
        given = torch.tensor([*completion.prompt_logprobs[1:], *completion.logprobs])
        is_close = is_close and torch.allclose(given, expected, rtol=1e-4, atol=1e-4)
        prompt = torch.tensor([completion.prompt_token_ids])
        stock = whole.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, prompt.shape[1]:].tolist()
        tokens.append(stock == completion.token_ids and len(stock) == NEW_TOKENS)
    spec, found, state = engine.cache_spec, dict(engine.named_weights()), whole.state_dict()
    is_close = is_close and all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    hf_paged.disable(sharded)
    return len(tokens) == len(PROMPTS) and all(tokens), is_close, (spec.num_heads, spec.num_kv_heads)
