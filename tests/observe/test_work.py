"""The estimate of a step's work against a count of what torch multiplies, and bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from support import random_prompts, run_out, stock_copy, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig

import hf_paged
from hf_paged.engine.observer import Launched
from hf_paged.observe.metrics import Recorder
from hf_paged.observe.work import sizes_of


class Watching(Recorder):
    """Keeps each step's plan and work."""

    def __init__(self, engine):
        super().__init__(sizes_of(engine.model, engine.cache_spec, 1), None)
        self.steps = []

    def launched(self, step: Launched):
        before = self.work
        super().launched(step)
        self.steps.append((step.plan, self.work.flops - before.flops, self.work.read - before.read,
                           self.work.written - before.written))


def steps_of(model, lengths, new_tokens, **options):
    engine = hf_paged.get_engine(hf_paged.enable(model, num_blocks=60, enable_prefix_caching=False, **options))
    watching = Watching(engine)
    engine.watch(watching)
    for prompt in random_prompts(lengths):
        engine.add_request(prompt, GenerationConfig(max_new_tokens=new_tokens))
    run_out(engine)
    return watching.steps


def counted(model, ids, past=0):
    """Floating-point operations of a forward over `ids` behind `past` tokens, as torch counts products."""
    model = stock_copy(model)
    model.set_attn_implementation("eager")  # its two products are counted, and those of a CPU's fused attention are not
    with torch.no_grad():
        cache = model(ids[:, :past], use_cache=True).past_key_values if past else None
        with FlopCounterMode(display=False) as counter:
            model(ids[:, past:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["qwen3", "qwen3 tied", "llama", "olmo2"])
def test_products_are_those_that_torch_counts(name):
    """One row: a prompt of 40 tokens, then single ones. Torch counts attention of a prompt over all pairs."""
    tied = name.endswith("tied")
    model = tiny_model(tie_word_embeddings=tied) if name.startswith("qwen3") else family_model(name)
    ids, config = torch.tensor(random_prompts([40])), model.config
    pair = 4 * config.num_hidden_layers * config.hidden_size // config.num_attention_heads * config.num_attention_heads
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    expected = counted(model, ids), counted(model, torch.cat([ids, ids[:, :1]], 1), past=40)
    (_, prefill, *_), (_, decode, *_) = steps_of(model, [40], 2)
    assert prefill == expected[0] - pair * (40 * 40 - 40 * 41 // 2)
    assert decode == expected[1]


def test_bytes_are_weights_once_and_the_keys_and_values_of_every_row():
    model = tiny_model()
    products = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name) * 4
    token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, their size, bytes
    steps = steps_of(model, [40, 7], 3)
    (_, _, read, written), *decodes = steps
    assert (read, written) == (products + 47 * token, 47 * token)
    for number, (_, _, read, written) in enumerate(decodes, 1):
        assert (read, written) == (products + (47 + 2 * number) * token, 2 * token)


def test_chunks_add_up_to_the_whole_prompt_but_for_the_weights():
    whole = steps_of(tiny_model(), [50], 1)
    chunks = steps_of(tiny_model(), [50], 1, max_num_batched_tokens=16, max_num_seqs=4)
    assert len(whole) == 1 and len(chunks) == 4
    assert sum(flops for _, flops, *_ in chunks) == whole[0][1]
    assert sum(written for *_, written in chunks) == whole[0][3]


def test_a_token_meets_its_share_of_the_experts():
    model = family_model("qwen3-moe")
    sizes = sizes_of(model, hf_paged.get_engine(hf_paged.enable(model)).cache_spec, 1)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert sizes.expert_weights == experts > 0
    assert sizes.expert_share == model.config.num_experts_per_tok / model.config.num_experts
