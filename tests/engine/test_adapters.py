"""Requests under LoRA adapters of their own: tokens, the prefix cache, adapters that come, go and change meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support import HostMemory, Interrupt, assert_idle, interrupted, random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.models import fused, linears

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import randomize, with_adapter  # noqa: E402

NAMES = ("one", "two", "__base__", None)
GREEDY = GenerationConfig(max_new_tokens=8)


@pytest.fixture(params=["modules", "tables"], autouse=True)
def way(request, monkeypatch):
    """As on a CPU, where layers are called as they stand; and as with kernels, which their references stand in for."""
    if request.param == "tables":
        monkeypatch.setattr(fused, "reads_tables", lambda device: True)
        monkeypatch.setattr(linears, "adjacent_memory", HostMemory)


def two_adapters() -> Any:
    wrapped = with_adapter(tiny_model(), "one", 5)
    return with_adapter(wrapped, "two", 6, ("q_proj", "k_proj", "v_proj", "lm_head"))


def stocks(wrapped: Any, prompt: list[int], name: str | None, count: int = 8) -> list[int]:
    """What the model's own modules make of one prompt under an adapter, step by step without a cache."""
    ids = torch.tensor([prompt])
    names = {} if name is None else {"adapter_names": [name]}
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, wrapped(input_ids=ids, **names).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt):].tolist()


def finish(engine: Any) -> dict[str, Any]:
    """Every completion by its request's id."""
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
    return done


@pytest.fixture
def wrapped():
    return hf_paged.enable(two_adapters(), strict=True)


def add(engine: Any, prompt: list[int], name: str | None, **options: Any) -> str:
    return engine.add_request(prompt, options.pop("config", GREEDY), adapter_name=name, **options)


def test_each_request_has_its_own(wrapped):
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21, 5], seed=2)
    asked = {add(engine, prompt, name): (prompt, name) for prompt in prompts for name in NAMES}
    done = finish(engine)
    assert {key: completion.token_ids for key, completion in done.items()} == {
        key: stocks(wrapped, *one) for key, one in asked.items()}
    assert len({str(done[key].token_ids) for key in list(asked)[:4]}) == 3  # None is "one", the first
    assert_idle(wrapped.get_base_model())


def test_adapters_with_copies_of_head_and_embedding():
    saved = {"modules_to_save": ["lm_head", "embed_tokens"]}
    wrapped = with_adapter(with_adapter(tiny_model(), "one", 5, ["q_proj"], **saved), "two", 6, ["v_proj"], **saved)
    engine, prompt = hf_paged.get_engine(hf_paged.enable(wrapped, strict=True)), random_prompts([40])[0]
    asked = {add(engine, prompt, name): name for name in NAMES}
    expected = {key: stocks(wrapped, prompt, name) for key, name in asked.items()}
    assert {key: completion.token_ids for key, completion in finish(engine).items()} == expected
    assert len({str(tokens) for tokens in expected.values()}) == 3


def test_log_probabilities_are_the_adapters(wrapped):
    engine, prompt = hf_paged.get_engine(wrapped), random_prompts([40], seed=2)[0]
    asked = {add(engine, prompt, name, logprobs=True, prompt_logprobs=True): name for name in NAMES}
    for key, completion in finish(engine).items():
        names = {} if asked[key] is None else {"adapter_names": [asked[key]]}
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            scores = wrapped(input_ids=ids, **names).logits.log_softmax(-1)[0, :-1]
        expected = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert completion.prompt_logprobs[1:] == pytest.approx(expected[: len(prompt) - 1], abs=1e-3)
        assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-3)


@pytest.mark.parametrize(("name", "error", "message"), [
    ("nope", ValueError, "adapter_name='nope': the model has no adapter 'nope': expected one of 'one', 'two', '__bas"),
    ("", ValueError, "adapter_name=''"), (1, TypeError, "adapter_name=1"), (["one"], TypeError, "adapter_name="),
])
def test_what_is_no_adapter_is_refused(wrapped, name, error, message):
    engine = hf_paged.get_engine(wrapped)
    with pytest.raises(error, match=message):
        add(engine, [1, 2, 3], name)
    assert not engine.has_unfinished()


def test_a_model_without_adapters_is_its_own_base():
    model = hf_paged.enable(tiny_model(), strict=True)
    engine, prompt = hf_paged.get_engine(model), random_prompts([40])[0]
    keys = [add(engine, prompt, name) for name in ("__base__", None)]
    done = finish(engine)
    assert done[keys[0]].token_ids == done[keys[1]].token_ids
    with pytest.raises(ValueError, match="has no adapter 'one'"):
        add(engine, prompt, "one")


@pytest.mark.parametrize("change", ["merged", "switched off"])
def test_adapters_that_cannot_be_named(wrapped, change):
    """A request that came before the change ends with its reason; one that comes after is refused."""
    engine, prompt = hf_paged.get_engine(wrapped), random_prompts([40])[0]
    early = [add(engine, prompt, name) for name in ("one", None)]
    if change == "merged":
        wrapped.merge_adapter(["one"])
    else:
        wrapped.base_model.disable_adapter_layers()
    expected = stocks(wrapped, prompt, None)
    done = finish(engine)
    assert done[early[0]].finish_reason == "error"
    assert "adapter_name='one'" in done[early[0]].error
    assert done[early[1]].token_ids == expected
    with pytest.raises(ValueError, match=change):
        add(engine, prompt, "two")


# -- the prefix cache --------------------------------------------------------------------------------------------------

PROMPT = random_prompts([5 * 16 + 4], seed=4)[0]


def cached(engine: Any, name: str | None, **options: Any) -> int:
    key = add(engine, PROMPT, name, **options)
    return finish(engine)[key].num_cached_tokens


def test_only_rows_of_the_same_adapter_share(wrapped):
    """Also over calls, whatever adapter is active then; a salt that is called as an adapter is no adapter."""
    engine = hf_paged.get_engine(wrapped)
    assert [cached(engine, name) for name in NAMES] == [0] * 4
    assert [cached(engine, name) for name in NAMES] == [80] * 4
    wrapped.set_adapter("two")
    assert [cached(engine, name) for name in NAMES] == [80, 80, 80, 0]
    wrapped.set_adapter("one")
    assert [cached(engine, name) for name in NAMES] == [80] * 4
    assert [cached(engine, name, cache_salt=salt) for name, salt in
            [(None, "two"), ("two", "two"), ("two", "one"), ("one", "two"), ("two", "two"), (None, "two")]
            ] == [0, 0, 0, 0, 80, 80]


def test_equal_prompts_of_one_step_share_by_adapter(wrapped):
    engine = hf_paged.get_engine(wrapped)
    keys = [add(engine, PROMPT, name) for name in ("one", "two", "one", "__base__", None, "two", "__base__")]
    done = finish(engine)
    assert [done[key].num_cached_tokens for key in keys] == [0, 0, 80, 0, 0, 80, 80]
    assert len({str(done[key].token_ids) for key in keys}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("change", ["scale", "weights", "deleted and added"])
def test_an_adapter_that_is_another_under_its_name_hits_nothing_old(wrapped, change):
    engine = hf_paged.get_engine(wrapped)
    for name in NAMES:
        cached(engine, name)
    if change == "scale":
        for module in wrapped.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("two", 3.0)
    elif change == "weights":
        randomize(wrapped, "two", 9)
    else:
        wrapped.delete_adapter("two")
        with_adapter(wrapped, "two", 9, ("q_proj", "k_proj", "v_proj", "lm_head"))
    expected = stocks(wrapped, PROMPT, "two")
    key = add(engine, PROMPT, "two")
    done = finish(engine)[key]
    assert (done.token_ids, done.num_cached_tokens) == (expected, 0)
    assert cached(engine, "two") == 80


# -- adapters that come and go while requests run ----------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_adapter_that_is_deleted_while_requests_name_it(overlap, steps):
    """Those that wait and those that run end with the reason; all others make their tokens."""
    wrapped = hf_paged.enable(two_adapters(), strict=True, overlap=overlap, max_num_seqs=4)
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21, 5], seed=2)
    asked = {add(engine, prompt, name): (prompt, name) for prompt in prompts for name in ("two", "__base__", "one")}
    expected = {key: stocks(wrapped, *one) for key, one in asked.items() if one[1] != "two"}
    for _ in range(steps):
        engine.step()
    wrapped.delete_adapter("two")
    done = finish(engine)
    assert {key: done[key].token_ids for key in expected} == expected
    lost = [done[key] for key, (_, name) in asked.items() if name == "two"]
    assert {completion.finish_reason for completion in lost} == {"error"}
    assert all("the model has no adapter 'two'" in completion.error for completion in lost)
    assert_idle(wrapped.get_base_model())


def test_an_adapter_that_is_gone_before_its_request_was_received(wrapped):
    """It came and went beside a request that runs, so the model is what it was for that one."""
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21], seed=2)
    running = add(engine, prompts[0], "two", config=GenerationConfig(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    with_adapter(wrapped, "late", 20)
    late = add(engine, prompts[1], "late")
    wrapped.delete_adapter("late")
    done = finish(engine)
    assert "the model has no adapter 'late'" in done[late].error
    assert done[running].token_ids == stocks(wrapped, prompts[0], "two", 20)


def test_an_adapter_that_is_deleted_under_a_call_that_does_not_stream(wrapped):
    """Another thread deletes it: the engine notices before the next step, though nobody's code runs between steps."""
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21], seed=2)
    expected = stocks(wrapped, prompts[1], "one", 60)
    hf_paged.disable(wrapped)
    with hf_paged.PagedGenerator(wrapped, num_blocks=64) as generator:
        core, commit = generator.engine._core, generator.engine._core._commit
        count = iter(range(1000))

        def deleting(launched: Any) -> None:
            commit(launched)
            if next(count) == 6:
                thread = threading.Thread(target=wrapped.delete_adapter, args=("two",))
                thread.start()
                thread.join()

        core._commit = deleting
        two, one = generator.generate(prompts, max_new_tokens=60, adapter_names=["two", "one"])
    assert (two.finish_reason, one.token_ids) == ("error", expected)
    assert len(two.token_ids) < 60
    del engine


def test_adapters_that_come_while_requests_run(wrapped):
    """Their names sort before those that run, so every entry of the executor moves."""
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21], seed=2)
    config = GenerationConfig(max_new_tokens=30)
    asked = {add(engine, p, name, config=config): (p, name) for p in prompts for name in ("two", "__base__", "one")}
    expected = {key: stocks(wrapped, *one, 30) for key, one in asked.items()}
    for seed, name in enumerate(("another", "a third")):
        for _ in range(4):
            engine.step()
        with_adapter(wrapped, name, 20 + seed, ("k_proj", "down_proj"))
        key = add(engine, prompts[0], name, config=config)
        expected[key] = stocks(wrapped, prompts[0], name, 30)
    assert {key: completion.token_ids for key, completion in finish(engine).items()} == expected


def test_rows_in_lockstep_whose_adapter_goes(wrapped):
    """Their caller gets the reason; a request beside them goes on."""
    engine, prompt = hf_paged.get_engine(wrapped), random_prompts([21], seed=2)[0]
    expected = stocks(wrapped, prompt, "one", 40)
    key = add(engine, prompt, "one", config=GenerationConfig(max_new_tokens=40))
    calls = []

    def deleting(ids: Any, scores: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            wrapped.delete_adapter("two")
        return scores

    ids = torch.tensor([prompt, prompt])
    with pytest.raises(ValueError, match="the model has no adapter 'two'"):
        wrapped.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, logits_processor=[deleting],
                         adapter_names=["two", "one"])
    for module in wrapped.modules():  # PEFT takes its hooks off only after calls that return
        module._forward_pre_hooks.clear()
    assert finish(engine)[key].token_ids == expected
    assert_idle(wrapped.get_base_model())


def test_rows_in_lockstep_when_another_adapter_comes(wrapped):
    """Its name sorts first, so the rows' entries move under them; their blocks stay."""
    prompt = random_prompts([21], seed=2)[0]
    expected = [stocks(wrapped, prompt, name, 12) for name in ("two", "__base__", "one")]
    calls = []

    def adding(ids: Any, scores: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            with_adapter(wrapped, "another", 20)
        return scores

    ids = torch.tensor([prompt] * 3)
    made = wrapped.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, logits_processor=[adding],
                            adapter_names=["two", "__base__", "one"])
    assert made[:, len(prompt):].tolist() == expected


@pytest.mark.each_value
@pytest.mark.parametrize("at", [3, 40, 170, 400])
def test_requests_keep_their_adapters_over_an_interrupt(at):
    wrapped = hf_paged.enable(two_adapters(), strict=True)
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 21], seed=2)
    asked = {add(engine, p, name): (p, name) for p in prompts for name in NAMES}
    expected = {key: stocks(wrapped, *one) for key, one in asked.items()}
    with interrupted(at), pytest.raises(Interrupt):
        finish(engine)
    done = finish(engine)
    assert {key: completion.token_ids for key, completion in done.items()} == expected
    assert_idle(wrapped.get_base_model())


def test_requests_keep_their_adapters_when_they_are_preempted():
    """Ten blocks for what needs twenty."""
    wrapped = hf_paged.enable(two_adapters(), strict=True, num_blocks=11, enable_prefix_caching=False)
    engine, prompts = hf_paged.get_engine(wrapped), random_prompts([40, 41, 42, 39], seed=2)
    config = GenerationConfig(max_new_tokens=30)
    asked = {add(engine, p, name, config=config): (p, name) for p, name in zip(prompts, NAMES, strict=True)}
    expected = {key: stocks(wrapped, *one, 30) for key, one in asked.items()}
    assert {key: completion.token_ids for key, completion in finish(engine).items()} == expected
    assert engine.stats().num_preemptions > 0


# -- anything, in any order --------------------------------------------------------------------------------------------


class AdaptersPromptsAndCache(RuleBasedStateMachine):
    """Requests under any adapter over prompts that share prefixes, between changes of adapters; tokens are stock's.

    Prompts and weights are such that keys of one adapter under another change the tokens, so that a block that is
    shared wrongly shows.
    """

    @initialize(blocks=st.sampled_from([24, 64]), overlap=st.booleans(), merge=st.booleans())
    def start(self, blocks, overlap, merge):
        self.wrapped = two_adapters()
        self.names = {"one", "two"}
        self.active = "one"
        self.seed = 30
        hf_paged.enable(self.wrapped, strict=True, num_blocks=blocks, overlap=overlap, merge_weights=merge)
        self.engine = hf_paged.get_engine(self.wrapped)
        self.expected: dict[str, list[int]] = {}
        self.of: dict[str, str | None] = {}
        self.known: dict[tuple, list[int]] = {}

    def _expected(self, prompt, name):
        key = (tuple(prompt), name or f"active {self.active}")
        if key not in self.known:
            self.known[key] = stocks(self.wrapped, prompt, name, 4)
        return self.known[key]

    @rule(length=st.sampled_from([16, 33, 48, 50]), variant=st.integers(0, 1),
          name=st.sampled_from(["one", "two", "three", "__base__", None]), salt=st.sampled_from([None, "two"]))
    def ask(self, length, variant, name, salt):
        prompt = PROMPT[: length - 1] + [variant + 1]
        if name not in (*self.names, "__base__", None):
            with pytest.raises(ValueError, match="has no adapter"):
                add(self.engine, prompt, name)
            return
        key = add(self.engine, prompt, name, config=GenerationConfig(max_new_tokens=4), cache_salt=salt)
        self.expected[key], self.of[key] = self._expected(prompt, name), name

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self._take(self.engine.step())

    def _take(self, outputs):
        for output in outputs:
            if output.completion is not None:
                assert output.completion.token_ids == self.expected.pop(output.request_id), output.completion

    def _finish(self):
        while self.engine.has_unfinished():
            self._take(self.engine.step())
        assert not self.expected

    @rule(rows=st.lists(st.tuples(st.sampled_from([16, 33, 48]), st.sampled_from(["one", "two", "__base__"])),
                        min_size=1, max_size=4))
    def generate(self, rows):
        """By PEFT's own `generate`, beside the requests."""
        if not {name for _, name in rows} <= {*self.names, "__base__"}:
            return
        width = max(length for length, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for line, seen, (length, _) in zip(ids, mask, rows, strict=True):
            line[width - length :], seen[width - length :] = torch.tensor(PROMPT[:length]), 1
        made = self.wrapped.generate(ids, attention_mask=mask, max_new_tokens=4, adapter_names=[n for _, n in rows])
        for line, (length, name) in zip(made[:, width:].tolist(), rows, strict=True):
            assert line == self._expected(PROMPT[:length], name)

    @rule(name=st.sampled_from(["one", "two", "three"]))
    def activate(self, name):
        """Requests of the active adapters would go on under others."""
        self._finish()
        if name in self.names:
            self.wrapped.set_adapter(name)
            self.active = name

    @rule()
    def come(self):
        """Under requests that run."""
        if "three" not in self.names:
            self.seed += 1
            with_adapter(self.wrapped, "three", self.seed, ("v_proj", "k_proj", "up_proj"))
            self.names.add("three")

    @rule()
    def go(self):
        """Requests that name it end."""
        if "three" in self.names and self.active != "three":
            self.wrapped.delete_adapter("three")
            self.names.discard("three")
            self.known = {key: tokens for key, tokens in self.known.items() if "three" not in key[1]}
            lost = {key for key, name in self.of.items() if name == "three"} & set(self.expected)
            while lost:
                for output in self.engine.step():
                    if output.request_id in lost and output.completion is not None:
                        completion, expected = output.completion, self.expected.pop(output.request_id)
                        assert completion.finish_reason == "error" or completion.token_ids == expected
                        lost.discard(output.request_id)
                    else:
                        self._take([output])

    @rule(name=st.sampled_from(["one", "two"]))
    def train(self, name):
        """Other weights under the name: running requests may not see half of each."""
        self._finish()
        self.seed += 1
        randomize(self.wrapped, name, self.seed)
        self.known = {}

    @invariant()
    def hooks_are_gone(self):
        if hasattr(self, "wrapped"):
            assert not any(module._forward_pre_hooks for module in self.wrapped.modules())

    def teardown(self):
        if hasattr(self, "engine"):
            self._finish()
            assert_idle(self.wrapped.get_base_model())


@pytest.mark.slow
def test_anything_in_any_order():
    run_state_machine_as_test(AdaptersPromptsAndCache, settings=settings(max_examples=12, stateful_step_count=14,
                                                                         deadline=None))
