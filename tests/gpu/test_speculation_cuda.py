"""Guesses on a GPU: their rows in graphs, alone and as groups, beside rows without; the tokens of no guesses."""

from __future__ import annotations

import random

import pytest
import torch
from support import random_prompts, tiny_model

import hf_paged
from hf_paged.engine.features.drafts import Speculation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("lengths", [[20], [900], [5, 300, 900, 40], [64] * 16], ids=str)
@pytest.mark.parametrize("settings", [
    {}, {"do_sample": True, "top_k": 20, "seed": 3, "repetition_penalty": 1.2, "logprobs": 2},
], ids=["greedy", "sampled"])
def test_right_and_wrong_guesses_change_no_token(monkeypatch, settings, lengths, backend):
    """float32, where products of other shapes move no choice; groups of any size are read together."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr("hf_paged.attention.choose_groups.MIN_SAVED", 0)
    monkeypatch.setattr("hf_paged.attention.plan_decode.MIN_SAVED_SHARE", 0.0)
    prompts, rng = random_prompts(lengths), random.Random(0)
    model = tiny_model(max_position_embeddings=2048).cuda()
    with hf_paged.PagedGenerator(model, num_blocks=600, max_num_seqs=16, attention_backend=backend) as generator:
        expected = generator.generate(prompts, max_new_tokens=40, **settings)
        outputs = {tuple(one.prompt_token_ids): one.token_ids for one in expected}

        def drafts(self, *_):
            found = {}
            for request in self._running.values():
                sequence = request.sequence
                if sequence.num_output_tokens and sequence.slot >= 0:
                    tokens = outputs[tuple(sequence.prompt_token_ids)][sequence.num_output_tokens :]
                    found[sequence.slot] = [rng.randrange(256) if rng.random() < 0.15 else token
                                            for token in tokens[: rng.randint(0, 7)]]
            return found

        monkeypatch.setattr(Speculation, "drafts", drafts)
        saved = generator.engine.stats().kv_bytes_saved
        made = generator.generate(prompts, max_new_tokens=40, prompt_lookup_num_tokens=7, **settings)
        stats = generator.engine.stats()
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    if "logprobs" in settings:
        for one, other in zip(made, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.kv_bytes_saved > saved or max(lengths) < 300
