"""`PagedGenerator`: prompts of every form in, completions out in order."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from support import (
    LOGITS,
    assert_idle,
    assert_same_but_for_near_ties,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    left_padded,
    lookup_chat,
    lookup_facts,
    random_prompts,
    stock_generate,
    tiny_model,
)
from tokenizers import decoders
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3ForCausalLM

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.settings import request_spec

PROMPTS = random_prompts([20, 5, 33, 16])


@pytest.fixture
def generator():
    with PagedGenerator(tiny_model(), byte_tokenizer()) as generator:
        yield generator
        assert_idle(generator.model) if generator.engine.stats().num_blocks else None


def greedy(model, prompt, new_tokens=12, **kwargs):
    output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=new_tokens, **kwargs)
    return output[0, len(prompt) :].tolist()


@pytest.fixture
def expected(generator):
    return [greedy(generator.model, p) for p in PROMPTS]


# -- forms of prompts ------------------------------------------


@pytest.mark.parametrize("form", [
    list, tuple, lambda prompts: [tuple(p) for p in prompts], lambda prompts: [np.array(p) for p in prompts],
])
def test_lists_of_token_ids(generator, expected, form):
    completions = generator.generate(form(PROMPTS), max_new_tokens=12)
    assert [c.token_ids for c in completions] == expected
    assert [c.prompt_token_ids for c in completions] == PROMPTS
    assert [c.finish_reason for c in completions] == ["length"] * 4
    for completion in completions:
        assert completion.text == generator.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.error, completion.logprobs, completion.num_cached_tokens) == (None, None, 0)


def test_one_prompt_of_token_ids_gives_a_list_of_one(generator, expected):
    [completion] = generator.generate(PROMPTS[0], max_new_tokens=12)
    assert completion.token_ids == expected[0]


def test_text(generator):
    texts = ["hello there", "a", "What is the code?"]
    completions = generator.generate(texts, max_new_tokens=6)
    for text, completion in zip(texts, completions, strict=True):
        ids = generator.tokenizer(text)["input_ids"]
        assert completion.prompt_token_ids == ids
        assert completion.token_ids == greedy(generator.model, ids, 6)
    [single] = generator.generate("a", max_new_tokens=6)
    assert single.token_ids == completions[1].token_ids


def test_no_prompts_give_no_completions(generator):
    assert generator.generate([], max_new_tokens=6) == []


def test_tensors_come_back_as_from_model_generate(generator):
    inputs = left_padded(PROMPTS)
    expected = stock_generate(generator.model, **inputs, max_new_tokens=7)
    assert_same_tensor(generator.generate(**inputs, max_new_tokens=7), expected)
    assert_same_tensor(
        generator.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=7), expected
    )
    config = GenerationConfig(max_new_tokens=7)
    assert_same_tensor(generator.generate(**inputs, generation_config=config), expected)


def test_sampled_tensors_with_a_seed(generator):
    inputs = batch([20, 7])
    options = {"max_new_tokens": 9, "do_sample": True, "temperature": 1.5}
    state = torch.get_rng_state()
    first = generator.generate(**inputs, **options, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.generate(**inputs, **options, seed=5), first)
    assert not torch.equal(generator.generate(**inputs, **options, seed=6), first)


def test_more_prompts_than_seats_keep_their_order():
    prompts = random_prompts([3 + i % 29 for i in range(40)])
    with PagedGenerator(tiny_model(), max_num_seqs=5) as generator:
        completions = generator.generate(prompts, max_new_tokens=6)
        assert [c.prompt_token_ids for c in completions] == prompts
        assert [c.token_ids for c in completions] == [greedy(generator.model, p, 6) for p in prompts]


# -- settings ------------------------------------------


def test_one_config_per_prompt(generator):
    free = [greedy(generator.model, p, 20) for p in PROMPTS]
    configs = [
        GenerationConfig(max_new_tokens=3),
        GenerationConfig(max_new_tokens=20, eos_token_id=free[1][6]),
        GenerationConfig(max_new_tokens=20, do_sample=True, top_k=1),
        GenerationConfig(max_length=20),
    ]
    completions = generator.generate(PROMPTS, configs)
    lengths = [len(c.token_ids) for c in completions]
    assert lengths[0] == 3
    assert lengths[1] == free[1].index(free[1][6]) + 1
    assert lengths[2:] == [20, 4]
    assert [c.token_ids for c in completions] == [f[:n] for f, n in zip(free, lengths, strict=True)]
    assert completions[1].finish_reason == "eos"


def test_settings_merge_as_in_stock(generator):
    generator.model.generation_config.max_new_tokens = 3
    assert [len(c.token_ids) for c in generator.generate(PROMPTS)] == [3] * 4
    assert [len(c.token_ids) for c in generator.generate(PROMPTS, GenerationConfig(max_new_tokens=5))] == [5] * 4
    both = generator.generate(PROMPTS, GenerationConfig(max_new_tokens=5), max_new_tokens=7)
    assert [len(c.token_ids) for c in both] == [7] * 4


@pytest.mark.parametrize("options", [{"min_length": 28}, {"min_length": 28, "min_new_tokens": 2}])
def test_min_new_tokens_take_precedence_over_min_length_as_in_stock(generator, expected, options):
    options |= {"eos_token_id": expected[0][4]}
    [completion] = generator.generate(PROMPTS[:1], max_new_tokens=12, **options)
    assert completion.token_ids == greedy(generator.model, PROMPTS[0], **options)
    assert (len(completion.token_ids) == 5) == ("min_new_tokens" in options)


def test_the_callers_config_is_not_changed(generator):
    config = GenerationConfig(max_new_tokens=5)
    before = config.to_dict()
    generator.generate(PROMPTS, config, temperature=0.5, do_sample=True)
    assert config.to_dict() == before


SAMPLE = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 10}


def test_seeds_of_the_call(generator):
    first = [c.token_ids for c in generator.generate(PROMPTS, seed=5, **SAMPLE)]
    assert [c.token_ids for c in generator.generate(PROMPTS, seed=5, **SAMPLE)] == first
    assert [c.token_ids for c in generator.generate(PROMPTS, seed=6, **SAMPLE)] != first
    torch.manual_seed(1)
    drawn = [c.token_ids for c in generator.generate(PROMPTS, **SAMPLE)]
    torch.manual_seed(1)
    assert [c.token_ids for c in generator.generate(PROMPTS, **SAMPLE)] == drawn
    assert [c.token_ids for c in generator.generate(PROMPTS, **SAMPLE)] != drawn


def test_equal_prompts_of_one_call_draw_their_own_tokens(generator):
    completions = generator.generate([PROMPTS[0]] * 4, seed=5, **SAMPLE)
    assert len({tuple(c.token_ids) for c in completions}) == 4


def test_a_seed_per_prompt_makes_a_prompt_independent_of_the_others(generator):
    together = generator.generate(PROMPTS, seed=[1, 2, 3, 4], **SAMPLE)
    for prompt, seed, completion in zip(PROMPTS, [1, 2, 3, 4], together, strict=True):
        [alone] = generator.generate([prompt], seed=[seed], **SAMPLE)
        assert alone.token_ids == completion.token_ids
    again = generator.generate(PROMPTS[::-1], seed=[4, 3, 2, 1], **SAMPLE)
    assert [c.token_ids for c in again] == [c.token_ids for c in together][::-1]


def test_num_return_sequences_come_in_a_row(generator):
    completions = generator.generate(PROMPTS[:2], num_return_sequences=3, seed=1, **SAMPLE)
    assert [c.prompt_token_ids for c in completions] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len({tuple(c.token_ids) for c in completions}) == 6
    per_prompt = [GenerationConfig(**SAMPLE, num_return_sequences=n) for n in (1, 3)]
    completions = generator.generate(PROMPTS[:2], per_prompt, seed=1)
    assert [c.prompt_token_ids for c in completions] == [PROMPTS[0]] + [PROMPTS[1]] * 3


def test_a_second_run_finds_the_prompts_in_the_cache(generator, expected):
    generator.generate(PROMPTS, max_new_tokens=12)
    completions = generator.generate(PROMPTS, max_new_tokens=12)
    assert [c.token_ids for c in completions] == expected
    # Full blocks of 20, 5, 33 and 16 tokens; a fully cached prompt still computes its last token.
    assert [c.num_cached_tokens for c in completions] == [16, 0, 32, 15]


def test_a_shared_prefix_is_found_within_one_call_too(generator):
    prompts = [PROMPTS[2] + tail for tail in random_prompts([3, 9, 1], seed=4)]
    completions = generator.generate(prompts, max_new_tokens=12)
    assert [c.num_cached_tokens for c in completions] == [0, 32, 32]
    assert [c.token_ids for c in completions] == [greedy(generator.model, p) for p in prompts]


def test_without_prefix_caching_nothing_is_found():
    with PagedGenerator(tiny_model(), enable_prefix_caching=False) as generator:
        for _ in range(2):
            assert [c.num_cached_tokens for c in generator.generate(PROMPTS, max_new_tokens=3)] == [0] * 4


def test_a_preempted_request_reports_what_it_found_at_first():
    with PagedGenerator(tiny_model(), num_blocks=9) as generator:
        completions = generator.generate(PROMPTS, max_new_tokens=40)
        assert generator.engine.stats().num_preemptions > 0
        assert [c.token_ids for c in completions] == [greedy(generator.model, p, 40) for p in PROMPTS]
        assert [c.num_cached_tokens for c in completions] == [0] * 4


# -- stream ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_stream(overlap):
    tokenizer = byte_tokenizer()
    with PagedGenerator(tiny_model(), tokenizer, overlap=overlap) as generator:
        free = [greedy(generator.model, p, 30) for p in PROMPTS]
        eos = [free[0][4], free[2][11]]
        expected = generator.generate(PROMPTS, max_new_tokens=30, eos_token_id=eos)
        tokens, texts, completions = [[] for _ in PROMPTS], [[] for _ in PROMPTS], {}
        order = []
        for index, output in generator.stream(PROMPTS, max_new_tokens=30, eos_token_id=eos):
            assert index not in completions
            order.append(index)
            tokens[index] += output.new_token_ids
            texts[index].append(output.new_text)
            if output.completion is not None:
                assert output.finish_reason == output.completion.finish_reason
                completions[index] = output.completion
        assert tokens == [c.token_ids for c in expected]
        assert ["".join(pieces) for pieces in texts] == [c.text for c in expected]
        assert [completions[i].token_ids for i in range(4)] == tokens
        assert order != sorted(order)  # token by token, not request by request
        assert_idle(generator.model)


def test_stream_without_a_tokenizer():
    with PagedGenerator(tiny_model()) as generator:
        outputs = list(generator.stream(PROMPTS, max_new_tokens=4))
        assert {output.new_text for _, output in outputs} == {None}
        assert {c.text for _, o in outputs if (c := o.completion)} == {None}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_a_stream_early_frees_its_blocks(overlap, after):
    with PagedGenerator(tiny_model(), overlap=overlap) as generator:
        stream = generator.stream(PROMPTS, max_new_tokens=50)
        for _ in range(after):
            next(stream)
        stream.close()
        if after:
            assert_idle(generator.model)
        assert [c.token_ids for c in generator.generate(PROMPTS, max_new_tokens=5)] == [
            greedy(generator.model, p, 5) for p in PROMPTS
        ]


def test_generate_in_the_middle_of_a_stream(generator, expected):
    stream = generator.stream(PROMPTS, max_new_tokens=12)
    collected = [next(stream) for _ in range(6)]
    inner = generator.generate(PROMPTS[::-1], max_new_tokens=12)
    collected += list(stream)
    assert [c.token_ids for c in inner] == expected[::-1]
    for index in range(4):
        assert [t for i, output in collected if i == index for t in output.new_token_ids] == expected[index]


def test_two_streams_in_turn(generator, expected):
    streams = [generator.stream(PROMPTS, max_new_tokens=12) for _ in range(2)]
    tokens = [[[] for _ in PROMPTS] for _ in streams]
    done = set()
    while len(done) < 2:
        for which, stream in enumerate(streams):
            item = next(stream, None)
            if item is None:
                done.add(which)
            else:
                tokens[which][item[0]] += item[1].new_token_ids
    assert tokens == [expected, expected]


def test_a_stream_checks_its_arguments_before_the_first_item(generator):
    with pytest.raises(ValueError, match="prompt_token_ids"):
        generator.stream([[1, 2], []], max_new_tokens=4)


def test_multibyte_characters_are_held_back_until_whole():
    """Tokens of a byte-level tokenizer cut characters in pieces; no piece of text may end in a replacement mark."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé漢🙂z")["input_ids"]
    from hf_paged.engine.text import TextStream

    for sequence in (ids, ids + [tokenizer("漢")["input_ids"][0]]):
        stream = TextStream(tokenizer)
        pieces = [stream.push([token]) for token in sequence]
        whole = tokenizer.decode(sequence, skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish(whole) == whole


# -- life ------------------------------------------


def test_the_model_is_enabled_while_the_generator_is_open():
    model = tiny_model()
    with PagedGenerator(model) as generator:
        assert hf_paged.is_enabled(model)
        assert hf_paged.get_engine(model) is generator.engine
        inputs = batch([20, 7])
        expected = stock_generate(model, **inputs, max_new_tokens=5)
        assert_same_tensor(model.generate(**inputs, max_new_tokens=5), expected)
        assert generator.engine.stats().num_generated_tokens == 10
    assert not hf_paged.is_enabled(model)
    assert type(model) is Qwen3ForCausalLM
    assert generator.engine.stats().kv_cache_bytes == 0
    generator.close()


def test_an_exception_inside_the_block_disables_too():
    model = tiny_model()
    with pytest.raises(KeyError), PagedGenerator(model):
        raise KeyError
    assert type(model) is Qwen3ForCausalLM


def test_a_closed_generator_does_not_generate():
    generator = PagedGenerator(tiny_model())
    generator.close()
    with pytest.raises(Exception, match=r"(?i)clos|enabled|disabled"):
        generator.generate(PROMPTS, max_new_tokens=3)


def test_a_second_generator_around_one_model_is_refused(generator):
    with pytest.raises(ValueError, match="enabled already"):
        PagedGenerator(generator.model)


def test_settings_by_config_and_by_name():
    with PagedGenerator(tiny_model(), config=hf_paged.PagedConfig(block_size=32), num_blocks=9) as generator:
        generator.generate(PROMPTS, max_new_tokens=3)
        stats = generator.engine.stats()
        assert stats.num_blocks == 9
        assert stats.kv_cache_bytes == 9 * 2 * 2 * 32 * 2 * 16 * 4
    with pytest.raises(TypeError, match="blocksize"):
        PagedGenerator(tiny_model(), blocksize=3)


def test_on_a_cpu_the_pool_has_its_stated_size_at_once():
    with PagedGenerator(tiny_model(), max_num_seqs=4) as generator:
        generator.generate(PROMPTS[0], max_new_tokens=2)
        stats = generator.engine.stats()
        assert stats.num_blocks == 4 * 512 // 16 + 1  # no more than the seats can use
        assert stats.num_pool_growths == 0


def test_from_pretrained(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with PagedGenerator.from_pretrained(tmp_path, device="cpu", block_size=32) as generator:
        assert generator.engine.config.block_size == 32
        assert [c.token_ids for c in generator.generate(PROMPTS, max_new_tokens=5)] == [
            greedy(model, p, 5) for p in PROMPTS
        ]
        assert generator.generate("hi", max_new_tokens=3)[0].text is not None


def test_from_pretrained_in_another_dtype_and_without_a_tokenizer(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with PagedGenerator.from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu") as generator:
        assert generator.model.dtype is torch.bfloat16
        assert generator.tokenizer is None
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        for prompt, completion in zip(PROMPTS, generator.generate(PROMPTS, max_new_tokens=5), strict=True):
            ids = torch.tensor([prompt])
            assert_same_but_for_near_ties(torch.tensor([prompt + completion.token_ids]),
                                          reference.generate(ids, max_new_tokens=5, **LOGITS))
        assert generator.generate(PROMPTS, max_new_tokens=2)[0].text is None


def test_from_pretrained_says_what_it_cannot_do(tmp_path):
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=0)
    with pytest.raises((OSError, ValueError), match="nothing-here"):
        PagedGenerator.from_pretrained(tmp_path / "nothing-here")


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_progress_can_be_switched(generator, capsys, use_tqdm):
    generator.generate(PROMPTS, max_new_tokens=3, use_tqdm=use_tqdm)
    shown = capsys.readouterr().err
    assert ("4 requests, 12 tokens" in shown and "tok/s" in shown) == bool(shown) == use_tqdm


# -- bad input ------------------------------------------

BAD_CALLS = {
    "empty prompt": (ValueError, "prompt_token_ids", {"prompts": [[3, 4], []]}),
    "empty text": (ValueError, "prompt", {"prompts": ["hello", ""]}),
    "id beyond the vocabulary": (ValueError, "256", {"prompts": [[3, 4], [3, 256]]}),
    "negative id": (ValueError, "-1", {"prompts": [[3, 4], [-1]]}),
    "float ids": (TypeError, "prompt", {"prompts": [[3, 4], [1.5]]}),
    "None": (TypeError, "prompts", {"prompts": None}),
    "a number": (TypeError, "prompts", {"prompts": 7}),
    "bytes": (TypeError, "prompts", {"prompts": b"hello"}),
    "a number among prompts": (TypeError, r"prompts\[1\]", {"prompts": ["hello", 7]}),
    "a dict": (TypeError, "prompts", {"prompts": {"text": "hello"}}),
    "a list of None": (TypeError, "prompts", {"prompts": [None]}),
    "too long": (ValueError, "max_model_len", {"prompts": [[3, 4], [5] * 512]}),
    "negative temperature": (ValueError, "temperature", {"do_sample": True, "temperature": -1.0}),
    "temperature as str": (TypeError, "temperature", {"do_sample": True, "temperature": "hot"}),
    "top_p above 1": (ValueError, "top_p", {"do_sample": True, "top_p": 3.0}),
    "zero new tokens": (ValueError, "max_new_tokens", {"max_new_tokens": 0}),
    "new tokens as str": ((ValueError, TypeError), "max_new_tokens", {"max_new_tokens": "9"}),
    "unknown setting": (ValueError, "max_new_token", {"max_new_token": 5}),
    "config as dict": (TypeError, "generation_config", {"generation_config": {"max_new_tokens": 5}}),
    "too few configs": (ValueError, "generation_config", {"generation_config": [GenerationConfig()]}),
    "too many seeds": (ValueError, "seed", {"seed": [1, 2, 3]}),
    "negative seed": (ValueError, "seed", {"seed": -1}),
    "seed as str": (TypeError, "seed", {"seed": "1"}),
    "several greedy sequences": (ValueError, "num_return_sequences", {"num_return_sequences": 2}),
    "zero sequences": (ValueError, "num_return_sequences", {"num_return_sequences": 0, "do_sample": True}),
    "beams": (hf_paged.UnsupportedOptionError, "num_beams=3", {"num_beams": 3}),
    "guidance": (hf_paged.UnsupportedOptionError, "guidance_scale=2.0", {"guidance_scale": 2.0}),
    "an empty stop string": (ValueError, "stop_strings", {"stop_strings": [""]}),
    "ids and prompts": (ValueError, "prompts", {"input_ids": torch.tensor([[1, 2]])}),
}


@pytest.mark.parametrize(("name", "method"), [
    (name, method) for name, (_, _, kwargs) in BAD_CALLS.items() for method in ("generate", "stream")
    if method == "generate" or "input_ids" not in kwargs
])
def test_bad_calls_name_the_argument_and_run_nothing(generator, name, method):
    error, message, kwargs = BAD_CALLS[name]
    kwargs = {"prompts": [[3, 4], [5]], "max_new_tokens": 4} | kwargs
    with pytest.raises(error, match=message):
        getattr(generator, method)(**kwargs)
    assert generator.engine.stats().num_generated_tokens == 0
    assert not generator.engine.stats().num_waiting
    assert len(generator.generate([[3, 4]], max_new_tokens=2)[0].token_ids) == 2


def test_text_without_a_tokenizer_is_refused():
    with PagedGenerator(tiny_model()) as generator, pytest.raises(ValueError, match="tokenizer"):
        generator.generate("hello")


def test_a_failing_request_ends_alone():
    model = tiny_model()
    expected = [greedy(model, p) for p in PROMPTS]
    assert not any(255 in p + e for p, e in zip(PROMPTS, expected, strict=True))
    with torch.no_grad():
        model.model.embed_tokens.weight[255] = torch.nan
    with PagedGenerator(model, byte_tokenizer()) as generator:
        prompts = [*PROMPTS[:2], [3, 255, 4], *PROMPTS[2:]]
        completions = generator.generate(prompts, max_new_tokens=12)
        assert [c.finish_reason for c in completions] == ["length", "length", "error", "length", "length"]
        assert completions[2].error
        assert completions[2].token_ids == []
        assert [c.token_ids for i, c in enumerate(completions) if i != 2] == expected
        assert_idle(model)


def test_an_output_that_outgrows_the_pool_ends_alone():
    with PagedGenerator(tiny_model(), num_blocks=5) as generator:
        configs = [GenerationConfig(max_new_tokens=n) for n in (10, 200, 10, 10)]
        completions = generator.generate(PROMPTS, configs)
        assert [c.finish_reason for c in completions] == ["length", "error", "length", "length"]
        for i in (0, 2, 3):
            assert completions[i].token_ids == greedy(generator.model, PROMPTS[i], 10)
        assert_idle(generator.model)


# -- the trained model ------------------------------------------


def test_chats_of_the_trained_model(trained_path, trained_tokenizer):
    facts = lookup_facts(30)
    names = list(facts)[::5]
    with PagedGenerator.from_pretrained(trained_path, dtype=torch.float32, device="cpu") as generator:
        chats = [lookup_chat(facts, name) for name in names]
        completions = generator.generate(chats, max_new_tokens=24)
        assert [c.text for c in completions] == [f"{name}: {facts[name]}" for name in names]
        assert {c.finish_reason for c in completions} == {"eos"}
        assert all(c.token_ids[-1] == trained_tokenizer.eos_token_id for c in completions)
        # The table is computed once: the other chats find all of it but its last, partial block.
        prompt = completions[0].prompt_token_ids
        assert [c.num_cached_tokens for c in completions[1:]] == [
            _common(prompt, c.prompt_token_ids) // 16 * 16 for c in completions[1:]
        ]
        [single] = generator.generate(chats[2], max_new_tokens=24)
        assert single.text == completions[2].text
        assert single.num_cached_tokens == (len(single.prompt_token_ids) - 1) // 16 * 16
        pieces = [output.new_text for _, output in generator.stream(chats[3], max_new_tokens=24)]
        assert "".join(pieces) == completions[3].text
        assert len(pieces) > 3


def _common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- open and closed ------------------------------------------


def test_a_stream_begun_before_close_does_not_run_after_it():
    generator = PagedGenerator(tiny_model())
    stream = generator.stream(PROMPTS[:1], max_new_tokens=3)
    generator.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    assert generator.engine.stats().kv_cache_bytes == 0


def test_a_stream_asks_again_whether_the_model_can_run_when_it_is_first_advanced(generator):
    stream = generator.stream(PROMPTS[:1], max_new_tokens=3)
    handle = generator.model.lm_head.register_forward_hook(lambda *args: -args[2])
    with pytest.raises(hf_paged.UnsupportedModelError, match="hook"):
        next(stream)
    handle.remove()


def test_requests_added_to_a_closed_engine_are_refused():
    generator = PagedGenerator(tiny_model())
    engine = generator.engine
    with engine.session() as session:
        generator.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.add(session, RequestSpec([1, 2, 3], 4, seed=0))
    assert engine.stats().kv_cache_bytes == 0


def test_a_generator_that_is_dropped_gives_the_model_and_the_memory_back():
    model = tiny_model()
    generator = PagedGenerator(model)
    generator.generate(PROMPTS[:1], max_new_tokens=3)
    pool = weakref.ref(generator.engine._core.pool.runner)
    del generator
    gc.collect()
    assert pool() is None
    assert type(model) is Qwen3ForCausalLM
    assert not hf_paged.is_enabled(model)
    with PagedGenerator(model) as again:
        assert again.generate(PROMPTS[:1], max_new_tokens=3)[0].token_ids == greedy(model, PROMPTS[0], 3)


def test_a_dropped_generator_does_not_disable_the_engine_of_another():
    model = tiny_model()
    first = PagedGenerator(model)
    first.close()
    second = PagedGenerator(model)
    del first
    gc.collect()
    assert hf_paged.get_engine(model) is second.engine
    second.close()


# -- seeds of tensors ------------------------------------------


def test_the_calls_seed_beats_the_configs_for_tensors_too():
    options = {"max_new_tokens": 9, "do_sample": True, "temperature": 2.0}
    inputs = batch([20, 7])
    with PagedGenerator(tiny_model(), seed=1) as generator:
        five, six, again = (generator.generate(**inputs, **options, seed=seed) for seed in (5, 6, 5))
        assert torch.equal(five, again)
        assert not torch.equal(five, six)
        own = generator.generate(**inputs, **options)
        assert torch.equal(own, generator.generate(**inputs, **options, seed=1))
        assert torch.equal(own, generator.generate(**inputs, **options))
        assert not torch.equal(own, five)


@pytest.mark.parametrize(("seed", "error"), [
    (-1, ValueError), (2**63, ValueError), (True, TypeError), ("a", TypeError), (1.0, TypeError), ([1], TypeError),
])
def test_bad_seeds_for_tensors_are_named_and_run_nothing(generator, seed, error):
    state = torch.get_rng_state()
    with pytest.raises(error, match="seed"):
        generator.generate(**batch([20, 7]), max_new_tokens=3, do_sample=True, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert generator.engine.stats().num_generated_tokens == 0


# -- tokenizers that fail ------------------------------------------


class TrippingTokenizer:
    """Decodes everything but outputs of more than `limit` tokens that begin with `first`."""

    def __init__(self, first, limit=3):
        self.first, self.limit = first, limit

    def decode(self, ids, **kwargs):
        if ids and ids[0] == self.first and len(ids) > self.limit:
            raise ValueError("this id is one too many")
        return " ".join(map(str, ids))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_tokenizer_that_raises_ends_its_request_alone(streaming, overlap):
    model = tiny_model()
    wanted = [greedy(model, p, 8) for p in PROMPTS]
    with PagedGenerator(model, TrippingTokenizer(wanted[0][0]), overlap=overlap) as generator:
        if streaming:
            outputs = list(generator.stream(PROMPTS, max_new_tokens=8))
            completions = [next(o.completion for i, o in outputs if i == n and o.completion) for n in range(4)]
            for n in range(1, 4):
                assert [t for i, o in outputs if i == n for t in o.new_token_ids] == wanted[n]
        else:
            completions = generator.generate(PROMPTS, max_new_tokens=8)
        assert completions[0].finish_reason == "error"
        assert "one too many" in completions[0].error
        assert completions[0].token_ids == wanted[0][: len(completions[0].token_ids)]
        for completion, tokens in zip(completions[1:], wanted[1:], strict=True):
            assert (completion.finish_reason, completion.token_ids) == ("length", tokens)
            assert completion.text == " ".join(map(str, tokens))
        assert_idle(generator.model)
    assert type(model) is Qwen3ForCausalLM


def test_a_tokenizer_that_raises_does_not_wedge_the_engine():
    model = tiny_model()
    first, second = (greedy(model, p, 8) for p in PROMPTS[:2])
    with PagedGenerator(model, TrippingTokenizer(first[0])) as generator:
        engine = generator.engine
        config = GenerationConfig(max_new_tokens=8)
        ids = [engine.add_request(p, config) for p in PROMPTS[:2]]
        reasons, tokens = {}, {}
        for _ in range(20):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.completion:
                    reasons[output.request_id] = output.completion.finish_reason
        assert not engine.has_unfinished()
        assert reasons == {ids[0]: "error", ids[1]: "length"}
        assert tokens[ids[1]] == second
        assert tokens[ids[0]] == first[: len(tokens[ids[0]])]


def test_models_own_generate_does_not_depend_on_the_generators_tokenizer():
    """It returns ids: neither a request of somebody else's nor its own output may fail in decode."""
    model = tiny_model()
    wanted = greedy(model, PROMPTS[0], 8)
    with PagedGenerator(model, TrippingTokenizer(wanted[0]), strict=True) as generator:
        generator.engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=8))
        for prompt in PROMPTS[:2]:
            inputs = {"input_ids": torch.tensor([prompt])}
            expected = stock_generate(model, **inputs, max_new_tokens=8)
            assert_same_tensor(model.generate(**inputs, max_new_tokens=8), expected)


# -- a tokenizer that changes ------------------------------------------


def _stopped(generator, tokenizer, token):
    """Tokens of a call that makes `token` over and over, with "END" as stop string, ours and stock's."""
    settings = {"max_new_tokens": 5, "stop_strings": ["END"], "sequence_bias": {(token,): 100.0}}
    stocks = {name: value for name, value in settings.items() if name != "max_new_tokens"}
    expected = greedy(generator.model, PROMPTS[0], 5, tokenizer=tokenizer, **stocks)
    [completion] = generator.generate([PROMPTS[0]], **settings)
    return completion.token_ids, expected


def test_stop_strings_follow_tokens_that_are_added_to_the_tokenizer():
    tokenizer = byte_tokenizer()
    with PagedGenerator(tiny_model(vocab_size=300), tokenizer) as generator:
        assert _stopped(generator, tokenizer, 256) == ([256] * 5, [256] * 5)
        tokenizer.add_tokens(["END"])
        assert tokenizer.convert_tokens_to_ids("END") == 256
        assert _stopped(generator, tokenizer, 256) == ([256], [256])


def test_stop_strings_and_texts_are_those_of_a_tokenizer_that_is_set_later():
    first, second = byte_tokenizer(), byte_tokenizer()
    first.add_tokens(["other"])
    second.add_tokens(["END"])
    with PagedGenerator(tiny_model(vocab_size=300), first) as generator:
        assert _stopped(generator, first, 256) == ([256] * 5, [256] * 5)
        generator.tokenizer = second
        assert _stopped(generator, second, 256) == ([256], [256])
        [completion] = generator.generate([PROMPTS[0]], max_new_tokens=1, sequence_bias={(256,): 100.0})
        assert completion.text == "END"
        pieces = [output.new_text for _, output in generator.stream(
            [PROMPTS[0]], max_new_tokens=1, sequence_bias={(256,): 100.0})]
        assert "".join(filter(None, pieces)) == "END"


def test_requests_of_the_same_stop_strings_share_a_criterion(generator):
    """Making one takes as long as a look at the whole vocabulary."""
    settings = request_spec(GenerationConfig(max_new_tokens=3, stop_strings=["ab"]), 5, 256)
    first = generator.engine.stop_rule(settings, PROMPTS[0])
    assert generator.engine.stop_rule(settings, PROMPTS[1]).strings is first.strings
    generator.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert generator.engine.stop_rule(settings, PROMPTS[1]).strings is not first.strings
