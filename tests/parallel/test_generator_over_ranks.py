"""`PagedGenerator.from_pretrained(tensor_parallel_size=n)` on CPUs: token for token what one process gives, whatever
comes in between. One set of processes per size serves all tests here; its pool is small, so that preemption is usual.
Two ranks take every test, four (slow) only those of the tokens: there a KV head is on two ranks.
"""

from __future__ import annotations

import asyncio
import enum
import re
import threading
from dataclasses import replace

import pytest
import torch
from support import random_prompts, run_out, tiny_model
from threads import run_threads
from transformers import GenerationConfig

from hf_paged import FallbackError, PagedGenerator, UnsupportedModelError, enable
from hf_paged.observe import progress

pytestmark = pytest.mark.slow  # further cases over ranks

VOCAB = 5000  # the last of four ranks has padding
SHAPE = {"vocab_size": VOCAB, "num_key_value_heads": 2, "num_attention_heads": 4}  # a KV head is on two of four ranks
PAGED = {"max_num_seqs": 6, "num_blocks": 14, "max_num_batched_tokens": 40, "seed": 7}
PROMPTS = random_prompts([5, 17, 40, 33, 9, 21, 1, 60, 16, 48], vocab_size=VOCAB)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(**SHAPE).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(checkpoint):
    with PagedGenerator.from_pretrained(checkpoint, **PAGED) as generator:
        yield generator


@pytest.fixture(scope="module", params=[2])
def sharded(request, checkpoint, trained_tokenizer):
    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=request.param, tokenizer=trained_tokenizer,
                                        **PAGED) as generator:
        yield generator


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "sharded" in request.fixturenames:
        engine = request.getfixturevalue("sharded").engine
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks - 1
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def ids(completions):
    return [completion.token_ids for completion in completions]


def by_name(options):
    return "-".join(options) or "greedy"


def assert_same_tokens(alone, sharded, options):
    before = sharded.engine.stats().num_preemptions
    assert sharded.engine.reset_prefix_cache() and alone.engine.reset_prefix_cache()
    length = 24 if "num_return_sequences" in options else 12  # samples share their prompts' blocks
    for _ in range(2):  # the second call hits the first one's prefixes
        made = sharded.generate(PROMPTS, max_new_tokens=length, seed=3, **options)
        expected = alone.generate(PROMPTS, max_new_tokens=length, seed=3, **options)
        assert ids(made) == ids(expected)
        assert [c.finish_reason for c in made] == [c.finish_reason for c in expected]
        assert [c.num_cached_tokens for c in made] == [c.num_cached_tokens for c in expected]
    if "eos_token_id" not in options:
        assert sharded.engine.stats().num_preemptions > before


@pytest.mark.parametrize("sharded", [2, 4], indirect=True)
@pytest.mark.parametrize("options", [
    {}, {"do_sample": True, "temperature": 1.2, "top_k": 30, "top_p": 0.9},
], ids=by_name)
def test_tokens_are_those_of_one_process(alone, sharded, options):
    assert_same_tokens(alone, sharded, options)


@pytest.mark.parametrize("options", [
    {"do_sample": True, "temperature": 1.2},
    {"do_sample": True, "min_p": 0.05, "num_return_sequences": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "typical_p": 0.8, "repetition_penalty": 1.1},
    {"eos_token_id": list(range(0, VOCAB, 20)), "min_new_tokens": 3, "do_sample": True},
], ids=by_name)
def test_tokens_of_more_options_are_those_of_one_process(alone, sharded, options):
    assert_same_tokens(alone, sharded, options)


@pytest.mark.core
def test_a_batch_of_unlike_requests(alone, sharded):
    """Rows with and without filters, edits and log-probabilities in the same steps."""
    configs = [
        GenerationConfig(max_new_tokens=10 + i, do_sample=i % 3 > 0, temperature=0.7 + 0.1 * i,
                         top_k=[None, 5, 0][i % 3], repetition_penalty=1.2 if i % 4 == 3 else None)
        for i in range(len(PROMPTS))
    ]
    made = sharded.generate(PROMPTS, configs, seed=11)
    assert ids(made) == ids(alone.generate(PROMPTS, configs, seed=11))
    assert [len(tokens) for tokens in ids(made)] == list(range(10, 20))


def test_the_bar_counts_tokens_while_ranks_run_and_the_call_is_counted(sharded, monkeypatch, capsys):
    """Rank 0's requests are made again when all ranks take them in."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    before = sharded.engine.stats().calls["native"]
    sharded.generate(PROMPTS, max_new_tokens=12, use_tqdm=True)
    shown = capsys.readouterr().err
    counts = [int(count) for count in re.findall(r"\| (\d+)/120 tok \[", shown)]
    assert counts == sorted(counts) and any(0 < count < 120 for count in counts)
    assert "| 10 requests, 120 tokens in " in shown
    after = sharded.engine.stats().calls["native"]
    assert (after.num_calls - before.num_calls, after.num_tokens - before.num_tokens) == (1, 120)


@pytest.mark.parametrize("kind", ["processed", "raw"])
def test_log_probabilities(alone, sharded, kind):
    asked = {"max_new_tokens": 8, "do_sample": True, "top_k": 50, "seed": 2, "logprobs": kind, "prompt_logprobs": True}
    for made, expected in zip(sharded.generate(PROMPTS, **asked), alone.generate(PROMPTS, **asked), strict=True):
        assert made.token_ids == expected.token_ids
        torch.testing.assert_close(torch.tensor(made.logprobs), torch.tensor(expected.logprobs), atol=1e-4, rtol=1e-4)
        assert made.prompt_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(made.prompt_logprobs[1:]), torch.tensor(expected.prompt_logprobs[1:]),
                                   atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_k": 0}, {"top_k": 0, "typical_p": 0.9}])
def test_the_likeliest_tokens_and_penalties_by_count(alone, sharded, filters):
    """Every rank finds those of its rows; ids are whole although they travel as floats."""
    asked = {"max_new_tokens": 8, "do_sample": True, "seed": 2, "frequency_penalty": 1.5, "presence_penalty": -0.5,
             "prompt_logprobs": 3, "logprobs": [5, 40, "raw", False, 2] * 2,
             "top_logprobs": [None, None, 9, None, None] * 2, **filters}
    for made, expected in zip(sharded.generate(PROMPTS, **asked), alone.generate(PROMPTS, **asked), strict=True):
        assert made.token_ids == expected.token_ids
        assert (made.top_logprobs is None) == (expected.top_logprobs is None)
        found = [*(made.top_logprobs or []), *made.prompt_top_logprobs[1:]]
        wanted = [*(expected.top_logprobs or []), *expected.prompt_top_logprobs[1:]]
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert max(max(one) for one in made.top_logprobs) > 256


def test_prompts_are_scored_and_times_run_out_on_every_rank(alone, sharded):
    scored = sharded.generate(PROMPTS, max_new_tokens=0, prompt_logprobs=True)
    for made, expected in zip(scored, alone.generate(PROMPTS, max_new_tokens=0, prompt_logprobs=True), strict=True):
        assert (made.token_ids, made.finish_reason) == ([], "length")
        assert made.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
    timeout = [None, 1e-6, 0.3, 1000.0]
    made = sharded.generate(PROMPTS[:4], max_new_tokens=60, timeout=timeout, eos_token_id=-1)
    assert [one.finish_reason for one in made[:2]] == ["length", "timeout"] and made[3].finish_reason == "length"
    assert made[1].timings.queued <= made[1].timings.ended


def test_the_best_and_stop_tokens(alone, sharded):
    asked = {"max_new_tokens": 8, "do_sample": True, "seed": 2, "best_of": 3, "num_return_sequences": 2,
             "stop_token_ids": list(range(0, VOCAB, 5))}
    best = alone.generate(PROMPTS[:3], **asked)
    for made, expected in zip(sharded.generate(PROMPTS[:3], **asked), best, strict=True):
        assert (made.token_ids, made.stop_reason) == (expected.token_ids, expected.stop_reason)
        assert made.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


def test_both_kinds_of_log_probabilities_in_one_step(alone, sharded):
    """They are added up over the ranks, in one order on all of them."""
    scores = []
    for generator in (alone, sharded):
        config = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=0.5)
        engine, found = generator.engine, {}
        asked = [engine.add_request(prompt, config, seed=5, logprobs=kind)
                 for prompt, kind in zip(PROMPTS[:5], ["raw", False, "processed", "raw", True], strict=True)]
        while engine.has_unfinished():
            found.update((o.request_id, o.completion.logprobs) for o in engine.step() if o.completion)
        scores.append([found[i] for i in asked])
    assert scores[0][1] is scores[1][1] is None
    for one, other in zip(*(lists[:1] + lists[2:] for lists in scores), strict=True):
        assert other == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_an_update_while_requests_run_reaches_every_rank(alone, sharded, mode):
    """Every rank's requests start over, or all keep their keys and values; nothing cached is left anywhere."""
    engine = sharded.engine
    sharded.generate(PROMPTS[:1], max_new_tokens=1)  # another test's last change of a weight is seen here
    before = engine.stats().weights_version
    made = {}
    for i, (index, output) in enumerate(sharded.stream(PROMPTS, max_new_tokens=12, on_weight_change=mode)):
        if i in (5, 30):
            with engine.weight_update():
                pass
        if output.completion is not None:
            made[index] = output.completion
    expected = alone.generate(PROMPTS, max_new_tokens=12)
    assert [made[i].token_ids for i in range(len(PROMPTS))] == ids(expected)
    assert engine.stats().weights_version == before + 2
    assert {v for c in made.values() for v in c.weight_versions} == {before, before + 1, before + 2}
    with engine.weight_update():
        pass
    assert [c.num_cached_tokens for c in sharded.generate(PROMPTS[:1], max_new_tokens=2)] == [0]
    assert ids(sharded.generate(PROMPTS, max_new_tokens=12)) == ids(expected)


def test_requests_go_on_from_their_tokens(alone, sharded):
    options = {"max_new_tokens": 14, "do_sample": True, "min_new_tokens": 9, "repetition_penalty": 1.2,
               "eos_token_id": list(range(0, VOCAB, 20)), "stop_strings": ["a"]}
    sharded_options = options if alone.tokenizer else {k: v for k, v in options.items() if k != "stop_strings"}
    whole = sharded.generate(PROMPTS, **sharded_options, seed=4, logprobs=True)
    parts = [replace(c, token_ids=c.token_ids[: 2 * i], logprobs=c.logprobs[: 2 * i], version_runs=())
             for i, c in enumerate(whole)]
    for made, one in zip(sharded.generate(parts, **sharded_options, logprobs=True), whole, strict=True):
        assert (made.token_ids, made.finish_reason) == (one.token_ids, one.finish_reason)
        assert made.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_tensors_as_in_model_generate(alone, sharded):
    ids_ = torch.tensor([PROMPTS[2][:20], PROMPTS[7][:20]])
    expected = alone.generate(input_ids=ids_, max_new_tokens=6)
    assert torch.equal(sharded.generate(input_ids=ids_, max_new_tokens=6), expected)


def test_the_seed_of_a_call_without_one_is_rank_0s(checkpoint, sharded):
    """torch's generators differ between ranks; the tokens do not."""
    made = sharded.generate(PROMPTS[:3], max_new_tokens=8, do_sample=True)
    assert ids(made) == ids(sharded.generate(PROMPTS[:3], max_new_tokens=8, do_sample=True, seed=PAGED["seed"]))


@pytest.mark.core
def test_aborts_in_flight_leave_the_others_alone(alone, sharded):
    engine = sharded.engine
    expected = ids(alone.generate(PROMPTS[:6], max_new_tokens=20))
    for i, prompt in enumerate(PROMPTS[:6]):
        engine.add_request(prompt, GenerationConfig(max_new_tokens=20), request_id=str(i))
    engine.abort("5")  # not even begun
    done = {}
    for step in range(200):
        if step == 9:
            engine.abort("1")
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
        if not engine.has_unfinished():
            break
    reasons = {i: completion.finish_reason for i, completion in done.items()}
    assert reasons == dict.fromkeys("0234", "length") | dict.fromkeys("15", "abort")
    assert 0 < len(done["1"].token_ids) < 20 and done["5"].token_ids == []
    for i in (0, 2, 3, 4):
        assert done[str(i)].token_ids == expected[i]
    assert done["1"].token_ids == expected[1][: len(done["1"].token_ids)]
    with pytest.raises(KeyError):
        engine.abort("1")


def test_a_stream_that_is_left_early(alone, sharded):
    expected = ids(alone.generate(PROMPTS[:3], max_new_tokens=20))
    stream = sharded.stream(PROMPTS[:3], max_new_tokens=20)
    seen = [next(stream) for _ in range(7)]
    stream.close()
    assert ids(sharded.generate(PROMPTS[:3], max_new_tokens=20)) == expected
    for index, output in seen:
        assert output.new_token_ids[0] in expected[index]
    pieces = {0: [], 1: [], 2: []}
    for index, output in sharded.stream(PROMPTS[:3], max_new_tokens=20):
        pieces[index] += output.new_token_ids
    assert list(pieces.values()) == expected


def test_calls_of_several_threads_share_batches(alone, sharded):
    expected = ids(alone.generate(PROMPTS, max_new_tokens=16))
    made: dict[int, list] = {}

    def call(i):
        made[i] = ids(sharded.generate([PROMPTS[i]], max_new_tokens=16))[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(PROMPTS))]
    run_threads(threads)
    assert [made[i] for i in range(len(PROMPTS))] == expected


def test_stop_strings_end_on_every_rank(sharded):
    free = sharded.generate(PROMPTS[:4], max_new_tokens=20)
    texts = [completion.text for completion in free]
    strings = [text[len(text) // 2 :][:2] for text in texts if text]
    made = sharded.generate(PROMPTS[:4], max_new_tokens=20, stop_strings=strings)
    assert "stop" in {completion.finish_reason for completion in made}
    for completion, whole in zip(made, free, strict=True):
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]


def test_max_time_is_rank_0s_clock(sharded):
    [made] = sharded.generate(PROMPTS[:1], max_new_tokens=140, max_time=0.1)
    assert 0 < len(made.token_ids) < 140 and made.finish_reason == "length"


@pytest.mark.core
def test_bad_input_reaches_no_rank(alone, sharded):
    for bad in ([[]], [[VOCAB]], [[-1]], [1] * 600):
        with pytest.raises((ValueError, TypeError)):
            sharded.generate(bad, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_return_sequences"):
        sharded.generate(PROMPTS[:1], max_new_tokens=4, num_return_sequences=2)
    assert ids(sharded.generate(PROMPTS[:2], max_new_tokens=4)) == ids(alone.generate(PROMPTS[:2], max_new_tokens=4))


@pytest.mark.core
def test_what_rank_0_cannot_do_alone_is_refused(sharded):
    """A plain forward, and calls that stock generate would carry out, would wait for ranks that do not take part."""
    input_ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(RuntimeError, match="other ranks only follow"), torch.no_grad():
        sharded.model(input_ids)
    with pytest.raises(FallbackError, match="sharded over several ranks"):
        sharded.generate(input_ids=input_ids, max_new_tokens=4, num_beams=2)
    assert len(sharded.generate(PROMPTS[:1], max_new_tokens=4)[0].token_ids) == 4


def test_cache_and_memory_go_on_every_rank(alone, sharded):
    expected = ids(alone.generate(PROMPTS[:4], max_new_tokens=6))
    sharded.generate(PROMPTS[:4], max_new_tokens=6)
    assert sharded.engine.reset_prefix_cache()
    assert [c.num_cached_tokens for c in sharded.generate(PROMPTS[7:8], max_new_tokens=6)] == [0]
    sharded.engine.release_memory()
    assert sharded.engine.stats().num_blocks == 0
    assert ids(sharded.generate(PROMPTS[:4], max_new_tokens=6)) == expected


def test_a_weight_that_changes_on_rank_0_serves_no_stale_cache(sharded):
    """Whether cached keys and values still belong to the weights, ranks decide together."""
    prompt = PROMPTS[7]
    sharded.generate([prompt], max_new_tokens=2)
    assert sharded.generate([prompt], max_new_tokens=2)[0].num_cached_tokens > 0
    norm = sharded.model.model.norm.weight
    with torch.no_grad():
        norm.mul_(2.0)
        assert sharded.generate([prompt], max_new_tokens=2)[0].num_cached_tokens == 0
        norm.div_(2.0)


def test_an_abandoned_stream_is_collected_while_ranks_meet(alone, sharded, monkeypatch):
    """The end of its requests waits: a broadcast inside of another one would stop all ranks for ever."""
    expected = ids(alone.generate(PROMPTS[:3], max_new_tokens=8))
    group, streams = sharded.engine.group, []
    broadcast = group.broadcast

    def collecting(thing):
        streams.clear()
        return broadcast(thing)

    def abandoned():
        streams.append(sharded.stream(PROMPTS[:2], max_new_tokens=30))
        next(streams[0])
        patch.setattr(group, "broadcast", collecting)

    with monkeypatch.context() as patch:
        abandoned()
        assert ids(sharded.generate(PROMPTS[:3], max_new_tokens=8)) == expected
    with monkeypatch.context() as patch:
        abandoned()
        assert not sharded.engine.reset_prefix_cache()  # outside of a step, too
    assert not streams and sharded.engine.reset_prefix_cache()


def test_values_of_the_users_own_classes(sharded):
    """Other ranks cannot import what the user's script defines."""

    class Priority(enum.IntEnum):
        LOW = 3

    class Name(str):
        pass

    engine = sharded.engine
    name = engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=2), priority=Priority.LOW,
                              request_id=Name("one"))
    made = run_out(engine)
    assert name == "one" and made[-1].completion.finish_reason == "length"


def test_a_parameter_that_is_replaced_on_rank_0_while_requests_run(alone, sharded):
    """All ranks compute their keys and values again, or none."""
    expected = ids(alone.generate(PROMPTS[:3], max_new_tokens=12))
    stream = sharded.stream(PROMPTS[:1], max_new_tokens=12)
    tokens = [next(stream)[1].new_token_ids[0]]
    linear = sharded.model.model.layers[0].self_attn.q_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    assert ids(sharded.generate(PROMPTS[1:3], max_new_tokens=12)) == expected[1:]
    for _, output in stream:
        tokens += output.new_token_ids
    assert tokens == expected[0]


def test_changes_that_other_ranks_cannot_follow_are_refused(sharded, monkeypatch):
    """A new pool or a new engine on rank 0 alone would leave the ranks out of step."""
    with monkeypatch.context() as patch:
        patch.setattr(sharded.model.config, "max_position_embeddings", 64)
        with pytest.raises(UnsupportedModelError, match="expected a new PagedGenerator"):
            sharded.generate(PROMPTS[:1], max_new_tokens=4)
    with pytest.raises(ValueError, match="follow the PagedGenerator"):
        enable(sharded.model, seed=5)
    errors = []

    def forward():
        try:
            with torch.no_grad():
                sharded.model(torch.tensor([PROMPTS[0]]))
        except RuntimeError as error:
            errors.append(str(error))

    with sharded.engine.group.together():  # as while this thread steps
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(60)
    assert "other ranks only follow" in errors[0]
    assert len(sharded.generate(PROMPTS[:1], max_new_tokens=4)[0].token_ids) == 4


FORMS = [{"regex": "[a-z]{2,9}-[0-9]{3}"}, None, {"choice": ["yes", "no"]}, {"regex": "[0-9]+"}, None]


@pytest.mark.parametrize("options", [
    {}, {"do_sample": True, "temperature": 1.4}, {"do_sample": True, "top_k": 9}, {"repetition_penalty": 1.5},
    {"logprobs": "raw"},
], ids=by_name)
def test_forms_are_followed_on_every_rank(alone, sharded, trained_tokenizer, monkeypatch, options):
    """Rows without filters are masked in each rank's columns, others where they are dealt out."""
    pytest.importorskip("xgrammar", reason="of the extra `structured`")
    monkeypatch.setattr(alone, "tokenizer", trained_tokenizer)
    kw = {"structured": FORMS * 2, "max_new_tokens": 16, "seed": 3, "eos_token_id": trained_tokenizer.eos_token_id}
    made, expected = (generator.generate(PROMPTS, **kw, **options) for generator in (sharded, alone))
    assert ids(made) == ids(expected)
    assert [c.finish_reason for c in made] == [c.finish_reason for c in expected]
    for form, one in zip(FORMS * 2, made, strict=True):
        if form is not None and "regex" in form and one.finish_reason == "eos":
            assert re.fullmatch(form["regex"], one.text)
    with pytest.raises(ValueError, match="Regex parsing error"):
        sharded.generate(PROMPTS[:1], structured={"regex": "("}, max_new_tokens=3)


def test_a_tokenizer_that_the_ranks_do_not_have_is_its_callers_error(sharded, trained_tokenizer, monkeypatch):
    """The other ranks could not compile the form, and all of them would be lost."""
    pytest.importorskip("xgrammar", reason="of the extra `structured`")
    monkeypatch.setattr(sharded, "tokenizer", None)
    with pytest.raises(ValueError, match=r"^tokenizer: expected the engine's"):
        sharded.model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, pad_token_id=0,
                               structured={"regex": "[a-z]+"}, tokenizer=trained_tokenizer)
    assert len(sharded.generate(PROMPTS[:1], max_new_tokens=4)[0].token_ids) == 4


def test_awaited_calls_share_the_ranks_and_a_cancelled_one_leaves_them(sharded, alone):
    expected = ids(alone.generate(PROMPTS[:4], max_new_tokens=12))

    async def main():
        calls = [asyncio.create_task(sharded.agenerate(prompt, max_new_tokens=12)) for prompt in PROMPTS[:4]]
        doomed = asyncio.create_task(sharded.agenerate(PROMPTS[4], max_new_tokens=100))
        await asyncio.sleep(0.1)
        doomed.cancel()
        assert [made[0].token_ids for made in await asyncio.gather(*calls)] == expected
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert ids(await sharded.agenerate(PROMPTS[1], max_new_tokens=12)) == expected[1:2]

    asyncio.run(main())
