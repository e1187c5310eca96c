"""On a GPU: prompts of all lengths beside decode rows, as exact as stock in the same dtype, by every kind of graph."""

from __future__ import annotations

import pytest
import torch
from support import random_prompts, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator

pytestmark = pytest.mark.gpu


@torch.no_grad()
def log_probs(model, prompt, made):
    """Of the tokens that were made, float64."""
    ids = torch.tensor([[*prompt, *made]], device="cuda")
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(made, device="cuda")[:, None])[:, 0].double()


def test_log_probs_are_as_exact_as_stocks():
    """First tokens and later ones, from graphs of decode rows and long prompts together, and of each alone."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 2048, "max_position_embeddings": 2048}
    exact = tiny_model(**shape).cuda().to(torch.bfloat16).float()
    lower = tiny_model(**shape).cuda().to(torch.bfloat16)
    lower.load_state_dict(exact.state_dict())
    lengths = [33, 900, 17, 410, 1500, 64, 700, 5, 1100, 20, 350, 800, 45, 1300, 600, 90, 1000, 250, 75, 480] * 3
    prompts = random_prompts(lengths)
    configs = [GenerationConfig(max_new_tokens=3 + i % 7, do_sample=False, eos_token_id=None)
               for i in range(len(prompts))]
    errors = {"ours": [], "stock": [], "ours, first": [], "stock, first": []}
    with PagedGenerator(lower, num_blocks=3000, max_num_batched_tokens=4096, max_num_seqs=24) as generator:
        for _ in range(3):  # behind two, all steps have their graphs
            generator.engine.reset_prefix_cache()
            made = generator.generate(prompts, configs, logprobs="raw", use_tqdm=False)
        keys = list(generator.engine._core.pool.runner.graphs._captured)
    for prompt, completion in zip(prompts, made, strict=True):
        wanted = log_probs(exact, prompt, completion.token_ids)
        ours = (torch.tensor(completion.logprobs, dtype=torch.float64, device="cuda") - wanted).abs()
        stock = (log_probs(lower, prompt, completion.token_ids) - wanted).abs()
        errors["ours"] += ours.tolist()
        errors["stock"] += stock.tolist()
        errors["ours, first"].append(float(ours[0]))
        errors["stock, first"].append(float(stock[0]))
    means = {name: sum(found) / len(found) for name, found in errors.items()}
    assert means["ours"] <= 1.15 * means["stock"], means
    assert means["ours, first"] <= 1.3 * means["stock, first"], means
    assert {"decode", "mixed"} <= {shape.kind for shape in keys}
