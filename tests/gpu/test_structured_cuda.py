"""Structured output on a GPU: masks by the kernel, steps as graphs up to the logits, native rows beside."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support import byte_tokenizer, random_prompts, tiny_model

from hf_paged import PagedGenerator
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens, mask_tokens_reference

pytestmark = pytest.mark.gpu
SCHEMA = {
    "type": "object", "required": ["name", "n"],
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab_size", "first"), [(151936, 0), (5000, 0), (1000, 17), (1, 31)])
def test_the_kernel_against_the_reference(dtype, vocab_size, first):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(9, vocab_size, device="cuda", generator=generator).to(dtype)
    words = torch.randint(-(2**31), 2**31, (4, -(-(vocab_size + first) // 32)), device="cuda", generator=generator)
    lines = torch.tensor([0, -1, 3, 3, -1, 1, 2, 0, -1], dtype=torch.int32, device="cuda")
    masks = TokenMasks(words.to(torch.int32), lines)
    expected = mask_tokens_reference(logits.clone(), masks, first)
    assert torch.equal(mask_tokens(logits.clone(), masks, first), expected)
    assert (expected[0] == -torch.inf).any() or vocab_size == 1


def test_rows_of_all_kinds_with_graphs_and_overlap(trained_path):
    pytest.importorskip("xgrammar")
    prompts = ["bold-fox", "amber", "What is 47 + 8?", "calm", "owl", "happy-crab"] * 4
    forms = [{"json_schema": json.dumps(SCHEMA)}, None, {"regex": "[0-9]{5}"}, {"choice": ["yes", "no"]}, None,
             {"grammar": 'root ::= "<" [a-z]{3,9} ">"'}] * 4
    kw = {"max_new_tokens": 96, "seed": 4, "do_sample": True, "temperature": 0.8, "use_tqdm": False}
    with PagedGenerator.from_pretrained(trained_path, dtype="float32", device="cuda") as generator:
        plain = generator.generate(prompts, **kw)
        before = generator.engine.stats().num_graphs_captured
        made = generator.generate(prompts, structured=forms, **kw)
        assert generator.engine.stats().num_graphs_captured > before  # steps up to the logits
        again = generator.generate(prompts, structured=forms, **kw)
    assert [one.token_ids for one in made] == [one.token_ids for one in again]
    for form, one, free in zip(forms, made, plain, strict=True):
        assert one.error is None
        if form is None:
            assert one.token_ids == free.token_ids
        elif "json_schema" in form:
            assert one.finish_reason == "length" or set(json.loads(one.text)) == {"name", "n"}
        else:
            pattern = form.get("regex") or ("yes|no" if "choice" in form else "<[a-z]{3,9}>")
            assert re.fullmatch(pattern, one.text) and one.finish_reason == "eos"


@pytest.mark.parametrize("options", [
    {}, {"do_sample": True, "temperature": 1.5}, {"do_sample": True, "top_k": 9, "logprobs": True},
    {"repetition_penalty": 1.3, "logprobs": "raw"}, {"logprobs": 3},
], ids=str)
def test_graphs_draw_under_masks_what_eager_steps_draw(options):
    """In two graphs a step, with masks made beside them; in fp32 the rounding of products decides no token."""
    pytest.importorskip("xgrammar")
    tokenizer, prompts = byte_tokenizer(), random_prompts([20, 5, 33, 16, 9, 40, 3, 12, 28])
    end = tokenizer("~")["input_ids"][0]
    forms = [{"json_schema": SCHEMA}, None, {"regex": "[0-9]{3,30}"}] * 3
    made = []
    for eager in (True, False):
        with PagedGenerator(tiny_model(eos_token_id=end).cuda(), tokenizer, enforce_eager=eager, num_blocks=200,
                            max_num_seqs=7) as generator:
            made.append(generator.generate(prompts, structured=forms, max_new_tokens=60, seed=3, use_tqdm=False,
                                           eos_token_id=end, **options))
            if not eager:
                names = {shape.kind for shape in generator.engine._core.runner.graphs._captured}
    assert {"undrawn", "masked"} <= names
    for one, other in zip(*made, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        if one.logprobs is not None:
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-3, atol=1e-3)
