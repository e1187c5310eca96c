"""How what callers get prints: one line of bounded length, whatever it holds."""

from __future__ import annotations

import pytest
from support import byte_tokenizer, random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import Completion, PagedGenerator, StepOutput

MOST = 400
HUGE = Completion(
    token_ids=list(range(100_000)), text="spam\n" * 100_000, finish_reason="length",
    prompt_token_ids=list(range(50_000)), logprobs=[-1.0] * 100_000, error="no\nroom " * 10_000,
    prompt_logprobs=[-2.0] * 50_000, top_logprobs=[{1: -1.0}] * 100_000, stop_reason="x" * 10_000,
)
SHOWN = {
    "a completion": HUGE,
    "a completion without text": Completion(list(range(10**6)), None, "x" * 9999, [1] * 10**6),
    "a step's output": StepOutput("r" * 9999, list(range(10**5)), "t\n" * 10**5, "length", HUGE, [-1.0] * 10**5),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_holds_much_prints_in_one_short_line(name):
    shown = repr(SHOWN[name])
    assert len(shown) < MOST and "\n" not in shown
    assert shown.startswith(type(SHOWN[name]).__name__ + "(")


def test_a_completion_tells_its_text_its_end_and_its_lengths():
    plain = Completion([5, 6, 7], "red-fox: 4821", "eos", [1] * 104)
    assert repr(plain) == "Completion(text='red-fox: 4821', finish_reason='eos', 3 tokens after a prompt of 104)"
    assert repr([plain, plain]).count("Completion(") == 2
    without = Completion([5, 6, 7], None, "length", [1] * 4)
    assert repr(without) == "Completion(token_ids=[5, 6, 7], finish_reason='length', 3 tokens after a prompt of 4)"
    failed = Completion([], None, "error", [], error="ValueError: empty")
    assert repr(failed) == ("Completion(token_ids=[], finish_reason='error', error='ValueError: empty', "
                            "0 tokens after a prompt of 0)")
    assert "4821', completion=" not in repr(StepOutput("a", [7], "!"))
    assert repr(StepOutput("a", [7], "!", "eos", plain)) == (
        f"StepOutput('a', new_token_ids=[7], new_text='!', completion={plain!r})")


def test_completions_compare_as_before():
    assert Completion([5], "a", "eos", [1]) == Completion([5], "a", "eos", [1]) != Completion([6], "a", "eos", [1])


def test_a_generator_and_its_engine_tell_what_they_run_and_do():
    model = tiny_model()
    model.name_or_path = "someone/" + "long-name\n" * 1000
    with PagedGenerator(model, byte_tokenizer(), num_blocks=41) as generator:
        engine = generator.engine
        for prompt in random_prompts([20, 5]):
            engine.add_request(prompt, GenerationConfig(max_new_tokens=40))
        engine.step()
        shown = "Engine(Qwen3ForCausalLM in float32 on cpu, 2 running, 0 waiting, 3 of 40 KV blocks in use)"
        assert repr(engine) == shown
        assert repr(generator).startswith("PagedGenerator('someone/") and repr(generator).endswith(f"{shown})")
        assert "tokenizer=" + type(generator.tokenizer).__name__ in repr(generator)
        assert len(repr(generator)) < MOST and "\n" not in repr(generator)
    assert repr(engine) == "Engine(closed)" and repr(generator).endswith("Engine(closed))")


def test_an_engine_prints_before_it_has_a_pool_and_after_its_model_is_gone():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    assert repr(engine) == "Engine(Qwen3ForCausalLM in float32 on cpu, no KV pool yet)"
    del model
    assert repr(engine) == "Engine(closed)"


def test_printing_an_engine_waits_for_no_step(monkeypatch):
    """A debugger prints what another thread may hold for minutes."""
    engine = hf_paged.get_engine(model := hf_paged.enable(tiny_model()))
    monkeypatch.setattr(engine, "_lock", None)
    assert "no KV pool yet" in repr(engine) and model is not None
