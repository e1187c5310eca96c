"""`PagedGenerator`: an adapter for the call, or one for each prompt, in each form of calling."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support import batch, left_padded, num_calls, random_prompts, tiny_model
from threads import run_threads
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

PROMPTS = random_prompts([40, 33, 20, 7])
NAMES = ["one", "two", "__base__", None]
GREEDY = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def stock():
    return with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)


@pytest.fixture(scope="module")
def expected(stock):
    """By prompt and name, what stock's `generate` makes."""
    found = {}
    for name in NAMES:
        named = {} if name is None else {"adapter_names": [name]}
        for i, prompt in enumerate(PROMPTS):
            made = stock.generate(torch.tensor([prompt]), **GREEDY, **named)
            found[i, name] = made[0, len(prompt):].tolist()
    assert len({str(found[0, name]) for name in NAMES}) == 3
    return found


@pytest.fixture
def generator():
    wrapped = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)
    with hf_paged.PagedGenerator(wrapped, num_blocks=256, strict=True) as generator:
        yield generator


@pytest.mark.parametrize("names", [None, "two", "__base__", NAMES], ids=str)
def test_lists_of_prompts(generator, expected, names):
    each = names if isinstance(names, list) else [names] * 4
    made = generator.generate(PROMPTS, adapter_names=names, **GREEDY)
    assert [c.token_ids for c in made] == [expected[i, name] for i, name in enumerate(each)]
    tokens = [[], [], [], []]
    for index, output in generator.stream(PROMPTS, adapter_names=names, **GREEDY):
        tokens[index] += output.new_token_ids
    assert tokens == [c.token_ids for c in made]


def test_sampled_rows_do_not_depend_on_their_neighbours(generator):
    """Alone or beside rows of other adapters, by the same seed; copies of a prompt have its adapter."""
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.5}
    made = generator.generate(PROMPTS, adapter_names=NAMES, seed=[7, 8, 9, 10], **options)
    for prompt, name, seed, completion in zip(PROMPTS, NAMES, (7, 8, 9, 10), made, strict=True):
        [alone] = generator.generate([prompt], adapter_names=name, seed=[seed], **options)
        assert alone.token_ids == completion.token_ids
    copies = generator.generate(PROMPTS, adapter_names=NAMES, num_return_sequences=3, seed=3, **options)
    greedy = generator.generate(PROMPTS, adapter_names=NAMES, num_return_sequences=3, seed=3, **options | {"top_k": 1})
    assert len({str(c.token_ids) for c in copies[:3]}) == 3
    assert [c.token_ids for c in greedy[::3]] == [c.token_ids for c in greedy[1::3]]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2},
                                     {"do_sample": True, "top_k": 1, "num_return_sequences": 2}], ids=str)
def test_tensors(generator, stock, options):
    inputs, names = batch([40, 33, 7]), ["two", "one", "__base__"]
    rows = [n for n in names for _ in range(2)] if options.get("do_sample") else names
    expected = stock.generate(**inputs, **GREEDY, **options, adapter_names=rows)
    assert torch.equal(generator.generate(**inputs, **GREEDY, **options, adapter_names=names), expected)
    one = generator.generate(**inputs, **GREEDY, **options, adapter_names="two", seed=3)
    assert torch.equal(one[: len(one) // 3], expected[: len(one) // 3])
    assert not any(module._forward_pre_hooks for module in generator.model.modules())


def test_a_batching_manager(generator, expected):
    manager = generator.model.get_base_model().init_continuous_batching(
        GenerationConfig(**GREEDY, do_sample=False), ContinuousBatchingConfig())
    manager.start()
    try:
        ids = {manager.add_request(PROMPTS[0], adapter_name=name): name for name in (*NAMES, "nope")}
        outputs = {key: manager.get_result(key, timeout=60) for key in ids}
    finally:
        manager.stop(block=True)
    for key, name in ids.items():
        if name == "nope":
            assert "has no adapter 'nope'" in outputs[key].error
        else:
            assert outputs[key].generated_tokens == expected[0, name]


def test_a_wrong_name_harms_nobody(generator, expected):
    made = generator.generate(PROMPTS, adapter_names=["nope", "two", 3, None], on_error="complete", **GREEDY)
    assert [c.finish_reason for c in made] == ["error", "length", "error", "length"]
    assert "has no adapter 'nope'" in made[0].error and "adapter_name=3" in made[2].error
    assert [made[1].token_ids, made[3].token_ids] == [expected[1, "two"], expected[3, None]]
    ids = torch.tensor([PROMPTS[0]])
    for names, error, message in (("nope", ValueError, "^adapter_name='nope'"), (3, TypeError, "^adapter_name=3"),
                                  (["one", "nope", "two", None], ValueError, r"^prompts\[1\]: adapter_name='nope'"),
                                  (["one"], ValueError, "adapter_names: a list of 1 for 4 prompts")):
        with pytest.raises(error, match=message):
            generator.generate(PROMPTS, adapter_names=names, **GREEDY)
        with pytest.raises(error, match=message):
            generator.stream(PROMPTS, adapter_names=names, **GREEDY)
    for names, error in (("nope", ValueError), (["one", "two"], ValueError), ([None], ValueError), ([3], TypeError)):
        with pytest.raises(error, match="adapter_name"):
            generator.generate(input_ids=ids, adapter_names=names, **GREEDY)
    stats = generator.engine.stats()
    assert stats.num_running == stats.num_waiting == 0


def test_tensors_of_several_threads_each_with_its_own_adapter():
    """Hooks lie on the model, and the names in them are one call's."""
    inputs = left_padded([PROMPTS[0], PROMPTS[0]])
    stock = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)
    expected = {name: stock.generate(**inputs, **GREEDY, **({} if name is None else {"adapter_names": [name] * 2}))
                for name in NAMES}
    wrapped = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6)
    failures: list[Any] = []
    with hf_paged.PagedGenerator(wrapped, num_blocks=256, strict=True) as generator:
        both_are_in = threading.Barrier(2, timeout=60)

        class Meeting(LogitsProcessor):
            """In the middle of a call, whose hooks are there."""

            has_met = False

            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if not self.has_met:
                    both_are_in.wait()
                self.has_met = True
                return scores

        def call(name: str | None) -> None:
            try:
                for options in ({"logits_processor": LogitsProcessorList([Meeting()])}, {}):
                    made = generator.generate(**inputs, **GREEDY, adapter_names=name, **options)
                    if not torch.equal(made, expected[name]):
                        failures.append((name, options))
                    both_are_in.wait()
            except Exception as error:
                failures.append(error)
                both_are_in.abort()

        for pair in (("one", "two"), ("__base__", None)):
            threads = [threading.Thread(target=call, args=(name,)) for name in pair]
            run_threads(threads)
        assert not failures
        assert num_calls(wrapped.get_base_model()).keys() == {"native", "lockstep"}
