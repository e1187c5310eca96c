"""New weights by their names into a generator over two ranks: what one process would have, on both of them."""

from __future__ import annotations

import functools
import signal
import threading
import time

import pytest
import torch
from ranks import run_ranks
from support import random_prompts, tiny_model

from hf_paged import PagedGenerator, PartlyLoadedError

pytestmark = pytest.mark.slow  # further cases over ranks

VOCAB = 2600
PROMPTS = random_prompts([5, 17, 40, 33], vocab_size=VOCAB)
SEEDS = {"old": 0, "new": 7}


@functools.cache
def state(name):
    return tiny_model(SEEDS[name], vocab_size=VOCAB).state_dict()


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected():
    """Each model's tokens, as one process makes them."""
    found = {}
    for name, seed in SEEDS.items():
        with PagedGenerator(tiny_model(seed, vocab_size=VOCAB)) as alone:
            found[name] = ids(alone.generate(PROMPTS, max_new_tokens=12))
    assert found["old"] != found["new"]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(SEEDS["old"], vocab_size=VOCAB).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(checkpoint):
    """Steps overlap, as on a GPU: of those that carry the news of a command one more may be in flight."""
    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2, overlap=True) as generator:
        yield generator


@pytest.fixture
def generator(shared):
    """Has the old weights before and after."""
    yield shared
    shared.load_weights(state("old"))


def made(generator):
    return ids(generator.generate(PROMPTS, max_new_tokens=12))


@pytest.mark.core
def test_weights_go_to_all_ranks_and_come_back_whole(generator, expected):
    assert made(generator) == expected["old"]
    for name in ("new", "old", "new"):
        version = generator.engine.stats().weights_version
        generator.load_weights(iter(state(name).items()))
        assert generator.engine.stats().weights_version == version + 1
        assert made(generator) == expected[name]
        found = dict(generator.named_weights())
        assert list(found) == list(state(name))
        assert all(torch.equal(tensor, state(name)[key]) for key, tensor in found.items())


def stream_over_a_load(generator, mode, cut):
    """Tokens of a request under which new weights come once it has `cut` of them, and how many the old ones made."""
    before, outputs = generator.engine.stats().weights_version, []
    for i, (_, output) in enumerate(generator.stream(PROMPTS[2:3], max_new_tokens=20, on_weight_change=mode), 1):
        outputs.append(output)
        if i == cut:
            generator.load_weights(iter(state("new").items()))
            assert dict(generator.named_weights())  # while the request runs
    versions = outputs[-1].completion.weight_versions
    assert versions == sorted(versions) and set(versions) == {before, before + 1}
    return outputs[-1].completion.token_ids, versions.count(before)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_requests_that_run_go_on_as_in_one_process(generator, mode):
    tokens, cut = stream_over_a_load(generator, mode, 6)
    assert 6 <= cut <= 9  # ranks hear of the load with a step that is launched, and others are then under way
    with PagedGenerator(tiny_model(0, vocab_size=VOCAB)) as alone:
        assert stream_over_a_load(alone, mode, cut) == (tokens, cut)
    with PagedGenerator(tiny_model(0, vocab_size=VOCAB)) as alone:
        other = stream_over_a_load(alone, {"keep": "recompute", "recompute": "keep"}[mode], cut)
    assert other != (tokens, cut), "keeping and computing anew make no difference"


def test_buckets_inside_of_one_update(generator, expected):
    names, version = list(state("new")), generator.engine.stats().weights_version
    with generator.engine.weight_update():
        for some in (names[::2], names[1::2]):
            generator.load_weights(((name, state("new")[name]) for name in some), partial=True)
        with pytest.raises(RuntimeError, match="inside a weight_update"):
            generator.engine.reset_prefix_cache()
    assert generator.engine.stats().weights_version == version + 1
    assert made(generator) == expected["new"]


def test_an_error_leaves_all_ranks_with_the_same_weights(generator, expected):
    """Whatever was wrong, the ranks hold together, and one more load puts everything right."""
    bad = state("new") | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"has shape \(3,\)"):
        generator.load_weights(bad)
    assert made(generator) == expected["old"]
    with pytest.raises(PartlyLoadedError, match=r"has shape \(3,\)") as caught:
        generator.load_weights(iter(bad.items()))
    assert caught.value.written[-1] == list(bad)[len(caught.value.written) - 1]
    found = dict(generator.named_weights())
    for name, tensor in found.items():
        assert torch.equal(tensor, state("new" if name in caught.value.written else "old")[name])

    def interrupted():
        yield from list(state("new").items())[:3]
        signal.raise_signal(signal.SIGINT)
        yield from list(state("new").items())[3:]

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            generator.load_weights(interrupted())
    finally:
        signal.signal(signal.SIGINT, handler)
    generator.load_weights(state("new"))
    assert made(generator) == expected["new"]


def test_other_threads_wait_and_go_on(generator, expected):
    found = []
    thread = threading.Thread(target=lambda: found.extend(made(generator)))

    def weights():
        for i, item in enumerate(state("old").items()):
            if i == 2:
                thread.start()
                time.sleep(0.05)
            yield item

    generator.load_weights(weights())
    thread.join(60)
    assert found == expected["old"]


def test_abandoned_reading_leaves_nothing_behind(generator, expected):
    name, tensor = next(generator.named_weights())
    assert torch.equal(tensor, state("old")[name])
    assert made(generator) == expected["old"]


def test_where_every_rank_runs_the_script(checkpoint):
    """Each takes its part of what it is given itself; all raise where one of them has to."""
    whole, nothing = run_ranks("rank_checks:load_weights", 2, checkpoint, state("new"))
    assert nothing["found"] == {}
    assert list(whole["found"]) == list(state("new"))
    assert all(torch.equal(tensor, state("new")[name]) for name, tensor in whole["found"].items())
    assert whole["tokens"] == nothing["tokens"]
    assert (whole["error"], nothing["error"]) == ("ValueError", "TypeError")
    assert "another rank" in whole["message"]
