"""`generate` of an enabled model equals stock `generate` token for token (CPU, fp32, strict)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    VOCAB,
    assert_native_parity,
    assert_same_tensor,
    batch,
    left_padded,
    lookup_chat,
    lookup_facts,
    random_prompts,
    stock_generate,
    tiny_model,
)

import hf_paged

RAGGED = [1, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 64, 65, 70, 3]  # around every edge of 16-token blocks


def enabled(seed: int = 0, /, *, paged: dict | None = None, **overrides):
    model = tiny_model(seed, **overrides)
    return hf_paged.enable(model, strict=True, **(paged or {}))


# -- batches, lengths, blocks ------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 16])
def test_every_batch_size_with_ragged_left_padding(rows):
    assert_native_parity(enabled(), **batch(RAGGED[-rows:]), max_new_tokens=12)


@pytest.mark.each_value
@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompts_and_outputs_that_end_around_block_edges(block_size, offset):
    model = enabled(paged={"block_size": block_size}, max_position_embeddings=1024)
    lengths = [block_size + offset, 2 * block_size + offset, max(1, block_size // 2)]
    assert_native_parity(model, **batch(lengths), max_new_tokens=18)


@pytest.mark.parametrize("new_tokens", [1, 2, 15, 16, 17, 33])
def test_output_lengths_around_block_edges(new_tokens):
    assert_native_parity(enabled(), **batch([16, 1, 9]), max_new_tokens=new_tokens)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [16, 32])
def test_settings_of_the_engine_do_not_change_tokens(overlap, caching, block_size):
    paged = {"overlap": overlap, "enable_prefix_caching": caching, "block_size": block_size}
    model = enabled(paged=paged)
    inputs = batch([70, 64, 33, 20, 7])
    assert_native_parity(model, **inputs, max_new_tokens=20)
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    assert_native_parity(model, **inputs, max_new_tokens=20)
    hits = hf_paged.get_engine(model).stats().prefix_cache_hits - before
    # A fully cached prompt still computes its last token: 63 of 64.
    expected = {16: 64 + 63 + 32 + 16 + 0, 32: 64 + 63 + 32 + 0 + 0}[block_size]
    assert hits == (expected if caching else 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_too_small_for_the_batch_preempts_and_still_gives_stocks_tokens(overlap, caching):
    # 8 rows need up to 5 blocks each; 12 are there.
    model = enabled(paged={"num_blocks": 13, "overlap": overlap, "enable_prefix_caching": caching})
    assert_native_parity(model, **batch([30, 17, 25, 9, 31, 16, 3, 28]), max_new_tokens=40)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_a_pool_that_fits_one_row_only_runs_the_batch_row_by_row():
    model = enabled(paged={"num_blocks": 5, "overlap": True})
    assert_native_parity(model, **batch([30, 40, 33]), max_new_tokens=24)


def test_fewer_seats_than_rows():
    model = enabled(paged={"max_num_seqs": 3})
    assert_native_parity(model, **batch([30, 17, 25, 9, 31, 16, 3, 28]), max_new_tokens=10)


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [8, 13, 16, 50])
@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_computed_in_chunks(budget, overlap):
    paged = {"max_num_batched_tokens": budget, "max_num_seqs": 8, "overlap": overlap}
    model = enabled(paged=paged)
    assert_native_parity(model, **batch([70, 33, 100, 5, 16]), max_new_tokens=10)
    steps = hf_paged.get_engine(model).stats().num_steps
    assert steps > 10 + (70 + 33 + 100 + 5 + 16) // budget - 2


def test_a_prompt_of_one_token():
    assert_native_parity(enabled(), input_ids=torch.tensor([[7]]), max_new_tokens=20)


def test_int32_input_ids_keep_stocks_dtype():
    inputs = batch([20, 5])
    inputs["input_ids"] = inputs["input_ids"].int()
    assert_native_parity(enabled(), **inputs, max_new_tokens=5)


def test_without_an_attention_mask_pad_tokens_in_front_are_masked_as_stock_infers():
    inputs = batch([20, 5])
    assert_native_parity(enabled(), input_ids=inputs["input_ids"], max_new_tokens=8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_attention_mask_of_another_dtype(dtype):
    inputs = batch([20, 5, 33])
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert_native_parity(enabled(), **inputs, max_new_tokens=8)


def test_tokens_under_the_padding_do_not_matter():
    model, inputs = enabled(), batch([20, 5, 33])
    expected = stock_generate(model, **inputs, max_new_tokens=8)[:, 33:]
    inputs["input_ids"][inputs["attention_mask"] == 0] = 77
    output = assert_native_parity(model, **inputs, max_new_tokens=8)
    assert torch.equal(output[:, 33:], expected)


def test_equal_rows_share_blocks_and_agree():
    prompt = random_prompts([50])[0]
    model = enabled()
    assert_native_parity(model, **left_padded([prompt] * 4), max_new_tokens=20)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 3 * 48


def test_rows_with_a_common_prefix_share_it_within_one_call():
    shared = random_prompts([32])[0]
    tails = random_prompts([3, 20, 40], seed=5)
    model = enabled()
    assert_native_parity(model, **left_padded([shared + tail for tail in tails]), max_new_tokens=20)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 2 * 32


def test_a_prompt_that_continues_an_earlier_answer_hits_what_decoding_cached():
    model = enabled()
    first = assert_native_parity(model, **batch([20]), max_new_tokens=30)
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    follow_up = torch.cat([first, torch.tensor([[9, 8, 7]])], dim=1)
    assert_native_parity(model, input_ids=follow_up, max_new_tokens=10)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits - before == 48  # 49 of 50 tokens have keys


def test_many_calls_in_a_row_over_one_small_pool_evict_and_stay_right():
    model = enabled(paged={"num_blocks": 12})
    for seed in range(8):
        assert_native_parity(model, **batch([40, 20, 33], seed=seed % 3), max_new_tokens=12)


def test_the_pool_of_an_enabled_model_grows_with_need_in_the_middle_of_a_call():
    model = enabled()
    assert_native_parity(model, **batch([100] * 12), max_new_tokens=40)
    stats = hf_paged.get_engine(model).stats()
    assert stats.num_pool_growths > 0
    assert stats.num_preemptions == 0


# -- ends ------------------------------------------


def _eos_for_different_steps(model, inputs, steps, **kwargs) -> list[int]:
    """Row i of stock's own greedy output shows token `ids[i]` at step `steps[i]`: as EOS it ends the row by then."""
    width = inputs["input_ids"].shape[1]
    free = stock_generate(model, **inputs, max_new_tokens=max(steps) + 1, **kwargs)[:, width:]
    return [int(free[row, step]) for row, step in enumerate(steps)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pad", [0, 250])
def test_rows_stop_at_different_steps_and_are_padded(overlap, pad):
    model = enabled(paged={"overlap": overlap})
    inputs = batch([20, 5, 33, 16])
    ids = _eos_for_different_steps(model, inputs, [0, 3, 9, 14])
    output = assert_native_parity(model, **inputs, max_new_tokens=30, eos_token_id=ids, pad_token_id=pad)
    ends = {next(i for i, t in enumerate(row) if t in ids) for row in output[:, 33:].tolist() if set(row) & set(ids)}
    assert len(ends) >= 3  # they did stop at different steps


@pytest.mark.each_value
@pytest.mark.parametrize("step", [0, 1, 15, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_row_with_eos_at_a_given_step(step, overlap):
    model, inputs = enabled(3, paged={"overlap": overlap}), batch([17])
    [eos] = _eos_for_different_steps(model, inputs, [step])
    assert_native_parity(model, **inputs, max_new_tokens=40, eos_token_id=eos)


def test_when_all_rows_stop_early_the_output_is_no_longer_than_the_longest():
    model, inputs = enabled(), batch([20, 5, 33])
    width = inputs["input_ids"].shape[1]
    ids = _eos_for_different_steps(model, inputs, [2, 4, 7])
    output = assert_native_parity(model, **inputs, max_new_tokens=100, eos_token_id=ids)
    assert output.shape[1] <= width + 8


def test_without_a_pad_token_stock_pads_with_the_first_eos():
    model, inputs = enabled(pad_token_id=None), batch([20, 5, 33])
    ids = _eos_for_different_steps(model, inputs, [1, 3, 5])
    output = assert_native_parity(model, **inputs, max_new_tokens=20, eos_token_id=ids)
    assert (output[0, 35:] == ids[0]).all()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "setting", [{"min_new_tokens": 6}, {"min_length": 39}, {"min_new_tokens": 6, "min_length": 37}]
)
def test_a_minimum_length_bars_eos(setting, overlap):
    model, inputs = enabled(paged={"overlap": overlap}), batch([20, 5, 33])
    ids = _eos_for_different_steps(model, inputs, [1, 3, 5])
    short = stock_generate(model, **inputs, max_new_tokens=20, eos_token_id=ids)
    output = assert_native_parity(model, **inputs, max_new_tokens=20, eos_token_id=ids, **setting)
    assert not torch.equal(output, short)


def test_a_minimum_length_survives_preemption():
    model = enabled(paged={"num_blocks": 13})
    inputs = batch([30, 17, 25, 9, 31, 16, 3, 28])
    ids = _eos_for_different_steps(model, inputs, [1, 3, 5, 7, 9, 11, 13, 15])
    assert_native_parity(model, **inputs, max_new_tokens=40, eos_token_id=ids, min_new_tokens=30)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_eos_with_preemption():
    model = enabled(paged={"num_blocks": 13})
    inputs = batch([30, 17, 25, 9, 31, 16, 3, 28])
    ids = _eos_for_different_steps(model, inputs, [39, 30, 25, 39, 22, 39, 38, 35])[3:4]
    assert_native_parity(model, **inputs, max_new_tokens=40, eos_token_id=ids)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_an_eos_outside_the_vocabulary_never_stops():
    assert_native_parity(enabled(), **batch([20, 5]), max_new_tokens=10, eos_token_id=VOCAB + 5)


def test_max_length_counts_the_padded_prompt():
    output = assert_native_parity(enabled(), **batch([20, 5, 33]), max_length=45)
    assert output.shape[1] == 45


def test_the_default_length_is_stocks():
    output = assert_native_parity(enabled(), **batch([20, 5]))
    assert output.shape[1] == 20 + 20


def test_a_generation_config_object_is_merged_over_the_models():
    model = enabled()
    model.generation_config.max_new_tokens = 3
    config = type(model.generation_config)(max_new_tokens=9)
    inputs = batch([20, 5])
    expected = stock_generate(model, **inputs, generation_config=config)
    actual = model.generate(**inputs, generation_config=config)
    assert_same_tensor(actual, expected)
    assert actual.shape[1] == 29
    assert_same_tensor(model.generate(**inputs), stock_generate(model, **inputs))
    assert model.generate(**inputs).shape[1] == 23


def test_the_length_may_reach_exactly_the_models_positions():
    model = enabled(max_position_embeddings=64)
    assert_native_parity(model, **batch([40, 3]), max_new_tokens=24)


def test_the_length_may_fill_the_pool_exactly():
    # 4 blocks hold 64 tokens; the last of 65 needs no keys.
    model = enabled(paged={"num_blocks": 5})
    assert_native_parity(model, **batch([40]), max_new_tokens=25)


# -- models ------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
}


@pytest.mark.parametrize("overrides", [
    pytest.param({"tie_word_embeddings": True}, id="tied"),
    pytest.param({"num_attention_heads": 4, "num_key_value_heads": 4}, id="gqa1"),
    pytest.param({"num_attention_heads": 8, "num_key_value_heads": 2}, id="gqa4"),
    pytest.param({"num_attention_heads": 8, "num_key_value_heads": 1}, id="gqa8"),
    pytest.param({"head_dim": 32}, id="head_dim32"),
    pytest.param({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 80}, id="head_dim80"),
    pytest.param({"num_hidden_layers": 1}, id="one_layer"),
    pytest.param({"num_hidden_layers": 4}, id="four_layers"),
    pytest.param({"attention_bias": True}, id="attention_bias"),
    pytest.param({"hidden_act": "gelu"}, id="gelu"),
    pytest.param({"rms_norm_eps": 0.1}, id="large_eps"),
    pytest.param({"vocab_size": 509}, id="odd_vocabulary"),
    pytest.param({"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}, id="all_sliding"),
    pytest.param({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, id="half_sliding"),
    pytest.param({
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }, id="mixed_sliding"),
    pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="rope_theta"),
    pytest.param({"rope_parameters": LINEAR}, id="rope_linear"),
    pytest.param({"rope_parameters": YARN}, id="rope_yarn"),
    pytest.param({"rope_parameters": LLAMA3}, id="rope_llama3"),
    pytest.param({"rope_parameters": DYNAMIC}, id="rope_dynamic"),
])
def test_models_of_every_shape(overrides):
    model = enabled(**overrides)
    assert_native_parity(model, **batch([70, 33, 16, 5, 1]), max_new_tokens=20)


@pytest.mark.parametrize("overlap", [True, False])
def test_sliding_windows_with_preemption_and_chunks(overlap):
    paged = {"num_blocks": 16, "max_num_batched_tokens": 20, "max_num_seqs": 8, "overlap": overlap}
    model = enabled(paged=paged, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    assert_native_parity(model, **batch([60, 33, 50, 20, 44]), max_new_tokens=40)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


def test_longrope_below_its_original_length_is_native():
    model = enabled(rope_parameters=LONGROPE)
    assert_native_parity(model, **batch([40, 20, 3]), max_new_tokens=24)  # ends at 64 exactly


@pytest.mark.parametrize("lengths", [[45, 20], [64], [90, 30]])
def test_longrope_that_leaves_its_original_length_goes_to_stock(lengths):
    model = hf_paged.enable(tiny_model(rope_parameters=LONGROPE))
    inputs = batch(lengths)
    expected = stock_generate(model, **inputs, max_new_tokens=30)
    with pytest.warns(hf_paged.FallbackWarning, match="beyond 64 the model's frequencies"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=30), expected)
    # Back below the length, the short factors are in use again, and nothing computed with the long ones is served.
    assert_native_parity(model, **batch([40, 20, 3]), max_new_tokens=20)


def test_longrope_keeps_its_prefix_cache_between_calls():
    model, inputs = enabled(rope_parameters=LONGROPE), batch([40])
    assert_native_parity(model, **inputs, max_new_tokens=5)
    assert_native_parity(model, **inputs, max_new_tokens=5)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 32


def test_dynamic_rope_beyond_the_models_positions_goes_to_stock():
    model = hf_paged.enable(tiny_model(rope_parameters=DYNAMIC, max_position_embeddings=64))
    inputs = batch([50, 20])
    expected = stock_generate(model, **inputs, max_new_tokens=30)
    with pytest.warns(hf_paged.FallbackWarning, match="beyond 64 the model's frequencies"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=30), expected)
    assert_native_parity(model, **batch([40, 20, 3]), max_new_tokens=20)


@settings(max_examples=15)
@given(data=st.data())
def test_random_models_batches_and_engine_settings(data):
    draw = data.draw
    kv_heads = draw(st.sampled_from([1, 2, 3]), label="kv_heads")
    layers = draw(st.integers(1, 3), label="layers")
    sliding = draw(st.booleans(), label="sliding")
    model = tiny_model(
        draw(st.integers(0, 1000), label="model seed"),
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 4]), label="group"),
        head_dim=draw(st.sampled_from([16, 32]), label="head_dim"),
        hidden_size=draw(st.sampled_from([32, 64]), label="hidden"),
        tie_word_embeddings=draw(st.booleans(), label="tied"),
        attention_bias=draw(st.booleans(), label="bias"),
        use_sliding_window=sliding,
        sliding_window=draw(st.integers(2, 40), label="window"),
        max_window_layers=draw(st.integers(0, layers), label="full layers"),
    )
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=6), label="lengths")
    new_tokens = draw(st.integers(1, 24), label="new tokens")
    block_size = draw(st.sampled_from([16, 32]), label="block size")
    least = -(-(max(lengths) + new_tokens - 1) // block_size) + 1
    seats = draw(st.integers(1, 6), label="seats")
    hf_paged.enable(
        model, strict=True, block_size=block_size, max_num_seqs=seats,
        num_blocks=draw(st.none() | st.integers(max(2, least), least + 8), label="blocks"),
        max_num_batched_tokens=draw(st.integers(seats, 120), label="budget"),
        overlap=draw(st.booleans(), label="overlap"),
        enable_prefix_caching=draw(st.booleans(), label="caching"),
    )
    kwargs = {"max_new_tokens": new_tokens, **batch(lengths, seed=draw(st.integers(0, 3), label="prompt seed"))}
    free = stock_generate(model, **kwargs)
    if draw(st.booleans(), label="with eos"):
        shown = sorted(set(free[:, kwargs["input_ids"].shape[1] :].flatten().tolist()))
        kwargs["eos_token_id"] = draw(st.lists(st.sampled_from(shown), min_size=1, max_size=3), label="eos")
        if draw(st.booleans(), label="with minimum"):
            kwargs["min_new_tokens"] = draw(st.integers(1, new_tokens), label="min_new_tokens")
    assert_native_parity(model, **kwargs)
    assert_native_parity(model, **kwargs)  # again, over what the first call left in the cache


# -- the trained model ------------------------------------------


@pytest.mark.parametrize("paged", [
    {}, {"block_size": 256, "overlap": True},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "max_num_seqs": 16},
])
def test_the_trained_model_answers_as_stock(trained_model, trained_tokenizer, paged):
    tables = [lookup_facts(count, seed=count) for count in (3, 20, 45)]
    chats = [lookup_chat(table, name) for table in tables for name in list(table)[::7]]
    chats.append([{"role": "user", "content": "What is 47 + 8?"}])
    texts = [trained_tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
    inputs = dict(trained_tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))
    hf_paged.enable(trained_model, strict=True, **paged)
    output = assert_native_parity(trained_model, **inputs, max_new_tokens=24, do_sample=False)
    answers = trained_tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answers[-1] == "47 + 8 = 55"
    assert answers[0] == "{}: {}".format(*next(iter(tables[0].items())))


def test_a_conversation_finds_its_earlier_turns_in_the_cache():
    """Each turn's prompt is all that was said before and a new question; only what is new is computed."""
    model, said = enabled(), torch.tensor(random_prompts([40]))
    engine = hf_paged.get_engine(model)
    for turn in range(3):
        before = engine.stats()
        answered = assert_native_parity(model, input_ids=said, max_new_tokens=20)
        hits = engine.stats().prefix_cache_hits - before.prefix_cache_hits
        # Full blocks of all that was there before; the last token of an answer was never fed to the model.
        assert hits == (0 if turn == 0 else (said.shape[1] - 9 - 1) // 16 * 16)
        said = torch.cat([answered, torch.tensor(random_prompts([9], seed=turn + 5))], dim=1)
