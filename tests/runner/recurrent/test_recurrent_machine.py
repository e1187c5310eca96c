"""Random histories of prompts that begin alike: each answer, state and snapshot is that of a model that computes all
tokens from nothing."""

from __future__ import annotations

import copy
import functools
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from recurrent_models import outlined, recurrent_model, with_idiom
from support import random_prompts, run_out
from transformers import GenerationConfig

from hf_paged import PagedGenerator
from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.runner.recurrent.recurrent_runner import RecurrentRunner
from hf_paged.scheduler import Status
from hf_paged.scheduler.block_pool import ROOT_PREFIX_ID

SYSTEM, *TAILS = random_prompts([40, 12, 5, 20])
PROMPTS = st.builds(lambda cut, tails: (SYSTEM[:cut] + [token for i in tails for token in TAILS[i]])[:70] or [5],
                    st.sampled_from([40, 40, 32, 16, 0]), st.lists(st.integers(0, 2), max_size=2))
NEAR = {"rtol": 2e-3, "atol": 2e-4}


@functools.cache
def models(name):
    """The model that runs, and two of whose weights it gets one: they compute from nothing."""
    model = outlined(recurrent_model(name))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            if "proj" in key or "embed" in key:
                parameter.mul_(0.8)
    return model, (copy.deepcopy(model), other)


@functools.cache
@torch.no_grad()
def computed(name, weights, tokens):
    """Log-probabilities behind each of these tokens, and stock's cache behind all of them."""
    out = models(name)[1][weights](torch.tensor([tokens]), use_cache=True)
    return out.logits[0].float().log_softmax(-1), out.get("past_key_values", out.get("cache_params"))


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


class RecurrentMachine(RuleBasedStateMachine):
    """Requests of one engine with few blocks, slots and snapshots."""

    name: str

    @initialize(blocks=st.sampled_from([9, 14, 40]), seqs=st.sampled_from([2, 4]), budget=st.sampled_from([11, 40]),
                overlap=st.booleans(), capacity=st.sampled_from([1, 3, 50]))
    def start(self, blocks, seqs, budget, overlap, capacity):
        self.model, self.weights = models(self.name)[0], 0
        self.use(0)
        self.generator = PagedGenerator(self.model, num_blocks=blocks, max_num_seqs=seqs, overlap=overlap,
                                        max_num_batched_tokens=budget, max_model_len=100)
        self.engine, self.capacity = self.generator.engine, capacity
        self.engine.add_request([1], GenerationConfig(max_new_tokens=1))
        run_out(self.engine)
        for layers in (*self.core.runner.cache.layers, self.core.runner.cache.states._tensors.values()):
            for tensor in layers:
                tensor.fill_(float("nan"))  # what no request has written is never read
        self.core.scheduler.snapshots.clear()
        self.versions, self.open, self.done = {self.engine.stats().weights_version: 0}, [], []

    @property
    def core(self):
        return self.engine._core

    def use(self, weights):
        with torch.no_grad():
            source = models(self.name)[1][weights].state_dict()
            for key, tensor in self.model.state_dict().items():
                tensor.copy_(source[key])
        self.weights = weights

    @rule(prompt=PROMPTS, samples=st.sampled_from([1, 1, 2, 4]), new=st.sampled_from([1, 3, 12]),
          scored=st.sampled_from([False, False, False, True]))
    def add(self, prompt, samples, new, scored):
        config = GenerationConfig(max_new_tokens=new, do_sample=False)
        for _ in range(samples):
            self.open.append(self.engine.add_request(prompt, config, logprobs=True, prompt_logprobs=scored))

    @precondition(lambda self: self.done)
    @rule(which=st.integers(0, 9), more=st.lists(st.integers(1, 9), max_size=3))
    def next_turn(self, which, more):
        completion = self.done[-1 - which % len(self.done)]
        self.add([*completion.prompt_token_ids, *completion.token_ids, *more][:80], 1, 4, False)

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        self.core.scheduler_or_build().snapshots.capacity = self.capacity
        for _ in range(steps):
            self.take(self.engine.step())

    def take(self, outputs):
        for output in outputs:
            if (completion := output.completion) is not None:
                self.open.remove(output.request_id)
                self.check(completion)
                self.done.append(completion)

    @precondition(lambda self: self.core.requests)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        requests = sorted(self.core.requests)
        self.engine.abort(requests[which % len(requests)])

    @rule()
    def preempt(self):
        if self.core.scheduler is not None:
            self.core.scheduler.make_room(1)

    @rule(share=st.sampled_from([1, 2]))
    def evict(self, share):
        scheduler = self.core.scheduler
        if scheduler is not None:
            pool = scheduler.kv_cache_manager.block_pool
            pool.free(pool.allocate(pool.num_free // share))
            scheduler.snapshots.drop([*scheduler.snapshots._kept][::share + 1])

    @rule()
    def change_weights(self):
        with self.engine.weight_update():
            self.use(1 - self.weights)
        self.versions[self.engine.stats().weights_version] = self.weights

    @precondition(lambda self: not self.engine.has_unfinished())
    @rule()
    def change_weights_unseen(self):
        self.use(1 - self.weights)
        self.add([7, 8], 1, 1, False)
        while self.engine.has_unfinished():
            self.versions.setdefault(self.engine.stats().weights_version, self.weights)
            outputs = self.engine.step()
            self.versions.setdefault(self.engine.stats().weights_version, self.weights)
            self.take(outputs)

    @rule(where=st.sampled_from([(RecurrentRunner, "_sample"), (RecurrentExecutor, "hidden_states")]))
    def interrupt(self, where):
        """Behind the states of a step, or in front of them."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*where, interrupt)
            with suppress(KeyboardInterrupt):
                self.take(self.engine.step())

    @rule(forwards=st.integers(0, 2))
    def fail(self, forwards):
        """A launch that raises between its forwards."""
        runs, left = RecurrentExecutor.hidden_states, [forwards]

        def failing(*args):
            left[0] -= 1
            if left[0] < 0:
                raise OSError
            return runs(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecurrentExecutor, "hidden_states", failing)
            with suppress(OSError):
                self.take(self.engine.step())

    @rule()
    def release(self):
        if not self.engine.has_unfinished():
            self.engine.release_memory()

    def check(self, completion):
        assert completion.finish_reason in ("length", "abort"), completion.error
        tokens = completion.prompt_token_ids + completion.token_ids
        for i, version in enumerate(completion.weight_versions):
            # An interrupt may leave the version of a token unknown.
            options = [self.versions[version]] if version is not None else [0, 1]
            place = len(completion.prompt_token_ids) + i
            known = [float(computed(self.name, weights, tuple(tokens))[0][place - 1, tokens[place]])
                     for weights in options]
            assert any(abs(one - completion.logprobs[i]) < 1e-3 for one in known), (i, known, completion.logprobs[i])

    @invariant()
    def states_are_those_of_their_tokens(self):
        """Of rows, up to what the last step computed, and of snapshots."""
        if not hasattr(self, "engine") or self.core.scheduler is None or self.core.dirty:
            return
        scheduler, runner = self.core.scheduler, self.core.runner
        for seq in scheduler._table.tenants():
            count = int(scheduler._table.scheduled[seq.slot])
            if seq.status is Status.RUNNING and count <= scheduler._table.known[seq.slot]:
                states = runner.cache.states.copy_of(seq.slot)
                self.compare(states, [], 0, scheduler._table.tokens[seq.slot, :count].tolist())
        pool = scheduler.kv_cache_manager.block_pool
        by_id = {block.prefix_id: block for same in pool.cached.values() for block in same.values()}
        for snapshot in scheduler.snapshots._kept:
            tail, prefix_id = np.frombuffer(snapshot.tail[0], np.int32).tolist(), snapshot.prefix_id
            tokens, is_whole = tail, pool.is_trusted(snapshot.generation) and snapshot.content is not None
            while is_whole and prefix_id != ROOT_PREFIX_ID:
                block = by_id.get(prefix_id)
                is_whole = block is not None and block.generation >= pool.trusted_from
                if is_whole:
                    tokens = np.frombuffer(block.content[:64], np.int32).tolist() + tokens
                    prefix_id = block.parent_id
            if is_whole:
                assert len(tokens) == snapshot.position
                self.compare(snapshot.content.states, snapshot.content.tail, len(tail), tokens)

    def compare(self, states, tail, num_tail, tokens):
        cache, first = computed(self.name, self.weights, tuple(tokens))[1], 0
        for shape in self.core.runner.spec.states:
            (layer, kind, index), end = shape.key, first + shape.nbytes // states.itemsize
            expected = getattr(cache.layers[layer], f"{kind}_states")[index][0]
            state = states[first:end].view(shape.dtype)[: expected.numel()].view(shape.shape)
            torch.testing.assert_close(state, expected, **NEAR)
            first = end
        if tail:
            layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
            assert len(tail) == 2 * len(layers)
            expected = [tensor[0, :, -num_tail:].transpose(0, 1) for layer in layers for tensor in (
                layer.keys, layer.values)]
            for found, one in zip(tail, expected, strict=True):
                torch.testing.assert_close(found, one, **NEAR)

    def teardown(self):
        if hasattr(self, "engine"):
            for _ in range(400):
                if not self.engine.has_unfinished():
                    break
                self.take(self.engine.step())
            assert not self.open
            scheduler = self.core.scheduler
            assert scheduler is None or scheduler.num_free_blocks == scheduler.num_blocks - 1
            self.generator.close()
            computed.cache_clear()


COMMON = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


class PackedMachine(RecurrentMachine):
    """On a CPU that has the kernels of layers with states, whose references run."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(recurrent_executor, "why_not_on", lambda device: None)

    def teardown(self):
        try:
            assert not hasattr(self, "engine") or self.engine._executor.packs_prompts
            super().teardown()
        finally:
            self.patch.undo()


def case(name, examples, steps, kind=RecurrentMachine):
    machine = type(f"{name}Machine", (kind,), {"name": name})
    cls = machine.TestCase
    cls.settings = settings(max_examples=examples, stateful_step_count=steps, **COMMON)
    return with_idiom(cls)


TestLfm2, TestQwen3_5Packed = case("Lfm2", 4, 15), case("Qwen3_5", 4, 15, PackedMachine)
TestQwen3NextPacked = pytest.mark.slow(case("Qwen3Next", 60, 30, PackedMachine))
TestQwen3Next, TestNemotronH = (pytest.mark.slow(case(name, 60, 30)) for name in ("Qwen3Next", "NemotronH"))
TestLfm2AtLength, TestJamba = (pytest.mark.slow(case(name, 60, 30)) for name in ("Lfm2", "Jamba"))
