"""Weights that change while requests run: what becomes of keys and values, who is told, and what is cached."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    Interrupt,
    assert_idle,
    assert_native_parity,
    batch,
    interrupted,
    random_prompts,
    run_out,
    stock_generate,
    tiny_model,
)
from threads import rows_of
from transformers import DynamicCache, GenerationConfig
from updated_weights import ORACLES, kept, recomputed

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.errors import EngineClosedError
from hf_paged.options.request_spec import RequestSpec

PROMPT = random_prompts([37])[0]
MODES = ("recompute", "keep")


def enabled(**config):
    return hf_paged.enable(tiny_model(), strict=True, **config)


def negate(model, layer=0):
    """Leaves no trace in `_version`, as a fused optimizer does."""
    model.model.layers[layer].self_attn.v_proj.weight.data.neg_()


def in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)


def replace_a_parameter(model):
    other = tiny_model(7).model.layers[0].self_attn.v_proj.weight.detach().clone()
    model.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(other)


def stretch_rope(model):
    model.model.rotary_emb.inv_freq.data.mul_(3.0)


def collect(engine, tokens, completions, steps=10**6):
    """Up to `steps` steps; what they bring by request."""
    while engine.has_unfinished() and steps:
        steps -= 1
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.completion is not None:
                completions[output.request_id] = output.completion


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", [negate, in_place, replace_a_parameter, stretch_rope])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_after_an_update_are_those_of_stock_with_its_keys_and_values(mode, change, overlap):
    model = enabled(on_weight_change=mode, overlap=overlap)
    engine = hf_paged.get_engine(model)
    request_id, tokens, completions = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=40)), {}, {}
    cuts = []
    for steps in (7, 12):
        collect(engine, tokens, completions, steps)
        with hf_paged.weight_update(model):
            change(model)
        cuts.append(len(engine._core.requests[request_id].sequence.output_token_ids))
    collect(engine, tokens, completions)
    completion = completions[request_id]
    assert tokens[request_id] == completion.token_ids
    expected = ORACLES[mode](tiny_model(), PROMPT, 40, dict.fromkeys(cuts, change))
    other = ORACLES[MODES[mode == MODES[0]]](tiny_model(), PROMPT, 40, dict.fromkeys(cuts, change))
    assert expected != other, "keeping and computing anew make no difference"
    assert completion.token_ids == expected
    assert completion.weight_versions == [0] * cuts[0] + [1] * (cuts[1] - cuts[0]) + [2] * (40 - cuts[1])
    assert engine.stats().weights_version == 2
    assert_idle(model)


def test_each_request_may_have_its_own_way():
    model = enabled()
    engine = hf_paged.get_engine(model)
    ids = [engine.add_request(PROMPT, GenerationConfig(max_new_tokens=30), on_weight_change=m) for m in (*MODES, None)]
    tokens, completions = {}, {}
    collect(engine, tokens, completions, 9)
    with engine.weight_update():
        negate(model)
    collect(engine, tokens, completions)
    changes = {9: negate}
    made = [completions[i].token_ids for i in ids]
    assert made[0] == made[2] == recomputed(tiny_model(), PROMPT, 30, changes)
    assert made[1] == kept(tiny_model(), PROMPT, 30, changes)


@pytest.mark.parametrize("value", ["never", True, 0])
def test_other_ways_are_refused(value):
    model = enabled()
    with pytest.raises(ValueError, match="on_weight_change"):
        hf_paged.get_engine(model).add_request(PROMPT, on_weight_change=value)
    with pytest.raises(ValueError, match="on_weight_change"):
        hf_paged.PagedConfig(on_weight_change=value)
    hf_paged.disable(model)
    with PagedGenerator(model) as generator:
        with pytest.raises(ValueError, match="on_weight_change"):
            generator.generate([PROMPT], on_weight_change=value)
        with pytest.raises(ValueError, match="where tensors come in"):
            generator.generate(torch.tensor([PROMPT]), on_weight_change="keep")


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_half_computed(mode):
    """Its first chunks are of the old weights, or computed again."""
    model = enabled(on_weight_change=mode, max_num_batched_tokens=16, max_num_seqs=4)
    engine = hf_paged.get_engine(model)
    request_id, tokens, completions = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=12)), {}, {}
    collect(engine, tokens, completions, 1)
    with engine.weight_update():
        negate(model)
    collect(engine, tokens, completions)

    other = tiny_model()
    with torch.no_grad():
        cache = DynamicCache()
        if mode == "keep":
            other(input_ids=torch.tensor([PROMPT[:16]]), past_key_values=cache)
        negate(other)
        logits = other(input_ids=torch.tensor([PROMPT[cache.get_seq_length() :]]), past_key_values=cache).logits
        made = [logits[0, -1].argmax().item()]
        while len(made) < 12:
            made.append(other(input_ids=torch.tensor([made[-1:]]), past_key_values=cache).logits[0, -1].argmax().item())
    assert completions[request_id].token_ids == made
    assert completions[request_id].weight_versions == [1] * 12
    assert_native_parity(model, input_ids=torch.tensor([PROMPT]), max_new_tokens=12)


# -- versions ------------------------------------------


def test_the_version_stays_while_nothing_changes_and_the_pool_comes_and_goes():
    model = enabled()
    engine = hf_paged.get_engine(model)
    for _ in range(2):
        model.generate(**batch([40]), max_new_tokens=3)
        engine.release_memory()
        model.generate(**batch([40]), max_new_tokens=3)
    assert engine.stats().weights_version == 0


@pytest.mark.parametrize("change", [negate, in_place, replace_a_parameter])
def test_a_change_that_nobody_announces_is_a_new_version_of_the_next_call(change):
    with PagedGenerator(tiny_model()) as generator:
        for version in range(3):
            completions = generator.generate([PROMPT, PROMPT[:5]], max_new_tokens=4)
            assert [c.weight_versions for c in completions] == [[version] * 4] * 2
            assert generator.engine.stats().weights_version == version
            change(generator.model)
            change = negate


def test_an_announced_change_is_one_new_version_whether_or_not_anything_runs():
    with PagedGenerator(tiny_model()) as generator:
        for version in range(1, 4):
            with generator.engine.weight_update():
                negate(generator.model)
            assert generator.engine.stats().weights_version == version
            [completion] = generator.generate([PROMPT], max_new_tokens=4)
            assert completion.weight_versions == [version] * 4


@pytest.mark.parametrize("runs", [False, True])
def test_constants_that_change_with_the_weights_are_no_version_of_their_own(runs):
    with PagedGenerator(tiny_model()) as generator:
        engine = generator.engine
        generator.generate([PROMPT], max_new_tokens=2)
        if runs:
            engine.add_request(PROMPT, GenerationConfig(max_new_tokens=6))
            engine.step()
        with engine.weight_update():
            negate(generator.model)
            generator.model.model.norm.variance_epsilon = 0.5
        run_out(engine)
        [completion] = generator.generate([PROMPT], max_new_tokens=4)
        assert completion.weight_versions == [1] * 4
        assert completion.token_ids == recomputed(generator.model, PROMPT, 4, {})


def test_without_a_prefix_cache_only_announced_changes_are_known():
    with PagedGenerator(tiny_model(), enable_prefix_caching=False) as generator:
        generator.generate([PROMPT], max_new_tokens=2)
        negate(generator.model)
        [completion] = generator.generate([PROMPT], max_new_tokens=2)
        assert completion.weight_versions == [0, 0]
        with generator.engine.weight_update():
            negate(generator.model)
        [completion] = generator.generate([PROMPT], max_new_tokens=2)
        assert completion.weight_versions == [1, 1]


def test_a_stream_brings_each_tokens_version():
    with PagedGenerator(tiny_model(), on_weight_change="keep") as generator:
        versions = []
        for i, (_, output) in enumerate(generator.stream([PROMPT], max_new_tokens=12)):
            assert len(output.new_weight_versions) == len(output.new_token_ids)
            versions += output.new_weight_versions
            if i % 4 == 3:
                with generator.engine.weight_update():
                    negate(generator.model)
        assert versions == output.completion.weight_versions == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_change_that_a_new_prompt_reveals(mode):
    """Nobody announces it; the counters tell when the next prompt comes in, and running requests follow the config."""
    model = enabled(on_weight_change=mode)
    engine = hf_paged.get_engine(model)
    first, tokens, completions = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=30)), {}, {}
    collect(engine, tokens, completions, 9)
    in_place(model)
    second = engine.add_request(PROMPT[:20], GenerationConfig(max_new_tokens=5))
    collect(engine, tokens, completions)
    assert completions[first].token_ids == ORACLES[mode](tiny_model(), PROMPT, 30, {9: in_place})
    assert completions[first].weight_versions == [0] * 9 + [1] * 21
    assert completions[second].weight_versions == [1] * 5


# -- what is cached ------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    modes=st.lists(st.sampled_from(MODES), min_size=3, max_size=3),
    plan=st.lists(st.sampled_from(["step", "steps", "announced", "data", "version", "arrival"]), max_size=14),
    num_blocks=st.sampled_from([9, 40]),
    overlap=st.booleans(),
)
def test_nothing_of_mixed_weights_is_served_later(lengths, modes, plan, num_blocks, overlap):
    """Whatever happened, a prompt that is what some request read and wrote gets stock's tokens with the weights of
    then, and what it hits is not of other weights."""
    model = enabled(num_blocks=num_blocks, overlap=overlap, max_num_batched_tokens=24, max_num_seqs=4)
    engine = hf_paged.get_engine(model)
    history = [5] * 60
    tokens, completions, prompts = {}, {}, {}

    def add(length):
        mode = modes[len(prompts) % 3]
        prompts[engine.add_request(history[:length], GenerationConfig(max_new_tokens=24), on_weight_change=mode)] = (
            history[:length])

    for length in lengths:
        add(length)
    for action in plan:
        if action == "announced":
            with engine.weight_update():
                negate(model)
        elif action == "data":
            negate(model, layer=1)
        elif action == "version":
            in_place(model)
        elif action == "arrival":
            add(17)
        else:
            collect(engine, tokens, completions, 1 if action == "step" else 6)
    middle = [[*prompt, *tokens.get(i, [])] for i, prompt in prompts.items()]
    for prompt in middle:  # while the others run
        assert_fresh(model, engine, prompt)
    collect(engine, tokens, completions)
    for i, prompt in prompts.items():
        assert_fresh(model, engine, prompt + completions[i].token_ids)
    assert_idle(model)


def assert_fresh(model, engine, prompt):
    """A prompt's log-probabilities are those of a forward with the weights as they are: keys that it hits are, too."""
    with engine.session() as session:
        engine.add(session, RequestSpec(prompt, 2, logprobs="processed", seed=0))
        while session.unfinished():
            for output in engine.advance([session])[0]:
                completion = output.completion
    with torch.no_grad():
        whole = torch.tensor([prompt + completion.token_ids])
        known = model(input_ids=whole).logits[0].log_softmax(-1)
    expected = [known[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion.token_ids)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-3)


# -- who waits for whom ------------------------------------------


@contextmanager
def rolling_out(engine, prompts, **config):
    """A thread that generates over and over; yields its completions, ends it at the end."""
    stop, made, errors = threading.Event(), [], []

    def work():
        try:
            while not stop.is_set():
                with engine.session() as session:
                    for prompt in prompts:
                        engine.add(session, RequestSpec(prompt, 20, seed=0))
                    while session.unfinished():
                        made.extend(o.completion for o in engine.advance([session])[0] if o.completion)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(60)
    assert not errors


@pytest.mark.parametrize("mode", MODES)
def test_another_thread_trains(mode):
    """No step runs while weights are half written: every other weight would show in the tokens."""
    model = enabled(on_weight_change=mode)
    engine = hf_paged.get_engine(model)
    weight = model.model.layers[0].self_attn.v_proj.weight
    steps = []
    with rolling_out(engine, [PROMPT, PROMPT[:9]]) as made:
        for _ in range(12):
            with engine.weight_update():
                before = engine._core.totals["steps"]
                weight.data.fill_(torch.nan)
                time.sleep(0.01)
                weight.data.copy_(tiny_model().model.layers[0].self_attn.v_proj.weight)
                steps.append(engine._core.totals["steps"] - before)
            time.sleep(0.01)
    assert steps == [0] * 12
    expected = stock_generate(model, input_ids=torch.tensor([PROMPT]), max_new_tokens=20)[0, len(PROMPT) :].tolist()
    of_prompt = [c for c in made if c.prompt_token_ids == PROMPT]
    assert of_prompt and all(c.token_ids == expected for c in of_prompt)  # the weights were put back each time
    assert engine.stats().weights_version == 12
    assert any(len(set(c.weight_versions)) > 1 for c in made), "no request spans an update"
    assert_idle(model)


def test_inside_nothing_runs_in_this_thread():
    model = enabled()
    engine = hf_paged.get_engine(model)
    request_id = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=6))
    engine.step()
    with engine.weight_update():
        with pytest.raises(RuntimeError, match="weight_update"):
            engine.step()
        with pytest.raises(RuntimeError, match="weight_update"):
            engine.add_request(PROMPT)
        with pytest.raises(RuntimeError, match="weight_update"), engine.weight_update():
            pass
        with pytest.raises(hf_paged.FallbackError):  # stock's, which a strict engine refuses
            model.generate(**batch([5]), max_new_tokens=2)
    tokens, completions = {}, {}
    collect(engine, tokens, completions)
    assert completions[request_id].weight_versions == [0] + [1] * 5


def test_an_exception_in_the_block_counts_as_an_update():
    model = enabled()
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, **batch([40]), max_new_tokens=4)

    def break_off():
        negate(model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), engine.weight_update():
        break_off()
    assert engine.stats().weights_version == 1
    hits = engine.stats().prefix_cache_hits
    assert_native_parity(model, **batch([40]), max_new_tokens=4)
    assert engine.stats().prefix_cache_hits == hits


def test_a_model_that_is_disabled_inside_ends_after_the_block():
    model = enabled()
    engine = hf_paged.get_engine(model)
    engine.add_request(PROMPT)
    engine.step()
    with engine.weight_update():
        hf_paged.disable(model)
    assert not engine.has_unfinished()
    with pytest.raises(EngineClosedError), engine.weight_update():
        pass
    with pytest.raises(ValueError, match="expected a model that"), hf_paged.weight_update(model):
        pass


def test_a_cast_inside_leaves_what_was_streamed_and_computes_the_rest_anew():
    model = enabled()
    engine = hf_paged.get_engine(model)
    request_id, tokens, completions = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=9)), {}, {}
    collect(engine, tokens, completions, 3)
    with engine.weight_update():
        model.double()
        model.float()
        model.bfloat16()
    given = len(tokens[request_id])
    collect(engine, tokens, completions)
    assert tokens[request_id] == completions[request_id].token_ids
    assert completions[request_id].weight_versions == [0] * given + [1] * (9 - given) and given == 3


def test_a_call_in_lockstep_keeps_its_keys_and_publishes_nothing_mixed():
    """As in stock, whose cache is what it is while a processor writes weights."""
    model = enabled()
    engine = hf_paged.get_engine(model)

    def processor(updates):
        def process(input_ids, scores):
            if input_ids.shape[1] == len(PROMPT) + 4:
                updates()
            return scores
        return process

    def announced():
        with engine.weight_update():
            negate(model)

    inputs = {"input_ids": torch.tensor([PROMPT]), "max_new_tokens": 20}
    made = model.generate(**inputs, logits_processor=[processor(announced)])
    other = tiny_model()
    assert torch.equal(made, other.generate(**inputs, logits_processor=[processor(lambda: negate(other))]))
    assert_native_parity(model, input_ids=made, max_new_tokens=8)


def test_rows_in_lockstep_whose_prompt_is_half_computed_publish_nothing_of_it():
    """The first chunk, of the old weights, ends inside of a block."""
    model = enabled(max_num_batched_tokens=8, max_num_seqs=4)
    engine = hf_paged.get_engine(model)
    with engine.lockstep(rows_of([PROMPT], 4)) as rows:
        rows._asked = torch.empty(1, 0, dtype=torch.int64)
        engine._core.step()
        assert rows.is_computing
        with engine.weight_update():
            negate(model)
        while rows.is_waiting:
            engine._core.step()
    assert_fresh(model, engine, PROMPT)
    assert_native_parity(model, input_ids=torch.tensor([PROMPT]), max_new_tokens=12)


def test_copies_of_the_weights_under_autocast_are_renewed_before_the_next_step():
    model, other = enabled(), enabled()
    engine, tokens, completions = hf_paged.get_engine(model), {}, {}
    with torch.autocast("cpu", torch.bfloat16):
        request_id = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=24))
        collect(engine, tokens, completions, 8)
    assert engine.stats().shadow_bytes > 0
    with engine.weight_update():
        negate(model)
    collect(engine, tokens, completions)
    negate(other)
    made = completions[request_id].token_ids
    with torch.autocast("cpu", torch.bfloat16):
        rest = other.generate(torch.tensor([PROMPT + made[:8]]), max_new_tokens=16)[0, len(PROMPT) + 8 :]
    assert made[8:] == rest.tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_were_streamed_stay_when_a_step_after_an_update_is_interrupted(mode, overlap):
    """Whoever has them cannot be given others in their place; what follows is computed with the weights as they are."""
    model, stock = enabled(on_weight_change=mode, overlap=overlap), tiny_model()
    engine, tokens, completions = hf_paged.get_engine(model), {}, {}
    request_id = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=12), logprobs=True)
    collect(engine, tokens, completions, steps=5)
    with engine.weight_update():
        changed = engine._core.requests[request_id].sequence.num_output_tokens
        negate(model)
    negate(stock)
    collect(engine, tokens, completions, steps=2)
    engine._core.dirty = True  # as an interrupt leaves it
    given = list(tokens[request_id])
    assert len(given) > changed > 0
    collect(engine, tokens, completions)
    made = completions[request_id]
    assert made.token_ids == tokens[request_id]
    ids = torch.tensor([PROMPT + given])
    expected = stock_generate(stock, input_ids=ids, max_new_tokens=12 - len(given))[0, len(PROMPT) :].tolist()
    assert made.token_ids == expected
    assert [run.num_tokens for run in made.version_runs] == [changed, 12 - changed]
    assert made.version_runs[1].version == made.version_runs[0].version + 1
    assert len(made.logprobs) == 12 and None not in made.logprobs


@pytest.mark.parametrize("overlap", [False, True])
def test_new_weights_are_new_ones_wherever_the_end_of_an_update_is_interrupted(overlap):
    """What runs does not go on over keys and values of the old ones, and the version is another."""
    def run(at):
        model = enabled(overlap=overlap)
        engine, tokens, completions, known = hf_paged.get_engine(model), {}, {}, []
        request_id = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=9))
        collect(engine, tokens, completions, steps=4)
        version = engine.stats().weights_version
        with suppress(Interrupt), interrupted(at) as calls, engine.weight_update():
            known = engine._core.requests[request_id].sequence.output_token_ids
            negate(model)
        collect(engine, tokens, completions)
        made = completions[request_id].token_ids
        assert made == tokens[request_id]
        if known:
            rest = stock_generate(stock, input_ids=torch.tensor([PROMPT + known]), max_new_tokens=9 - len(known))
            assert PROMPT + made == rest[0].tolist(), at
            assert engine.stats().weights_version > version
        assert_idle(model)
        return bool(known), calls()

    stock = tiny_model()
    negate(stock)
    count, written = run(None)[1], 0
    for at in range(1, count, max(1, count // 40)):
        written += run(at)[0]
    assert written > 10
