"""Adapters named by rows of models with a recurrent state: stock's tokens, in prompts one by one or packed, in chunks
and in decode steps, by modules and by kernels, whose references run without a GPU."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import outlined, poison, recurrent_model, with_idiom
from runner.recurrent.test_decode_kernels import rows  # noqa: F401
from support import assert_lockstep, assert_native_tokens, batch, random_prompts

import hf_paged
from hf_paged.models.tuners import BASE

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

pytestmark = with_idiom

# Linear layers of attention and of layers with states; of Mamba, PEFT takes no `out_proj`.
ATTENTION = ("q_proj", "v_proj", "o_proj")
TARGETS = {
    "Lfm2": (*ATTENTION, "in_proj", "out_proj", "w2", "lm_head"),
    "Qwen3_5": (*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "down_proj", "lm_head"),
    "Mamba2": ("in_proj", "embeddings"),
    "Bamba": (*ATTENTION, "in_proj", "down_proj"),
    "Qwen3Next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "NemotronH": (*ATTENTION, "in_proj", "down_proj"),
    "Mamba": ("in_proj", "x_proj"),
    "Jamba": (*ATTENTION, "in_proj", "x_proj"),
}
CORE = "Lfm2", "Qwen3_5", "Mamba2", "Bamba"
FAMILIES = [*CORE, *(pytest.param(name, marks=pytest.mark.slow) for name in TARGETS if name not in CORE)]
BY_KERNELS = "Qwen3_5", "Mamba2", "Bamba", pytest.param("Qwen3Next", marks=pytest.mark.slow)
PROMPTS = random_prompts([30, 5, 17, 1, 40, 9])
NAMES = ["one", "two", BASE, "two", None, "one"]
NEW = 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def adapted(name):
    """A model with two adapters, "one" of which is active."""
    model = with_adapter(outlined(recurrent_model(name)), "one", 5, TARGETS[name])
    return with_adapter(model, "two", 6, TARGETS[name][-2:])


def alone(model, prompts, names):
    """Stock's new tokens of each prompt under its adapter, one at a time."""
    found = []
    for prompt, name in zip(prompts, names, strict=True):
        named = {} if name is None else {"adapter_names": [name]}
        found.append(model.generate(torch.tensor([prompt]), **GREEDY, **named)[0, len(prompt):].tolist())
    return found


def assert_as_alone(model, **options):
    expected = alone(model, PROMPTS, NAMES)
    assert expected != alone(model, PROMPTS, [BASE] * 6) and expected[4] != alone(model, PROMPTS[4:5], [BASE])[0]
    with hf_paged.PagedGenerator(model, num_blocks=256, strict=True, max_num_seqs=4, **options) as generator:
        generator.generate(PROMPTS[3:4], max_new_tokens=1)
        poison(generator.engine)
        made = generator.generate(PROMPTS, adapter_names=NAMES, **GREEDY)
        assert [one.token_ids for one in made] == expected
        return generator.engine._executor


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_peft_is_native(name):
    """Whose padded rows are prompts by themselves here."""
    model, inputs, names = adapted(name), batch([30, 5, 17]), NAMES[:3]
    expected = model.generate(**inputs, **GREEDY, adapter_names=names)
    assert (expected != model.generate(**inputs, **GREEDY)).any(dim=1).sum() >= 2
    hf_paged.enable(model, strict=True)
    assert_native_tokens(model, expected, inputs, **GREEDY, adapter_names=names)


@pytest.mark.parametrize("budget", [7, 200])
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_have_an_adapter_each(name, budget):
    """Beside requests of other adapters, and of the active one, in chunks and whole."""
    assert_as_alone(adapted(name), max_num_batched_tokens=budget)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_get_what_adapted_projections_make(name):
    """In decode steps as graphs hold them, and in packed prompts."""
    model = adapted(name)
    executor = assert_as_alone(model, max_num_batched_tokens=32)
    assert executor.why_not_kernels(torch.device("cpu")) is None
    assert executor.packs_prompts


@pytest.mark.parametrize("name", CORE)
def test_no_prompt_goes_on_from_the_state_of_another_adapter(name):
    """Neither in blocks nor in snapshots; under the same adapter it does."""
    model, prompt = adapted(name), PROMPTS[4][:33]
    one, two, base = alone(model, [prompt] * 3, ["one", "two", BASE])
    assert one != two != base
    with hf_paged.PagedGenerator(model, num_blocks=256, strict=True) as generator:
        for adapter, expected, cached in (("one", one, 0), ("two", two, 0), ("one", one, 32), ("two", two, 32),
                                          (BASE, base, 0)):
            made, = generator.generate([prompt], adapter_names=adapter, **GREEDY)
            assert (made.token_ids, made.num_cached_tokens) == (expected, cached), adapter


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"output_logits": True, "return_dict_in_generate": True}],
                         ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("name", ["Lfm2", "Qwen3_5"])
def test_in_lockstep(name, options):
    assert_lockstep(adapted(name), **batch([30, 5, 17]), **GREEDY, **options, adapter_names=NAMES[:3])
