"""Steps of one row by one launch for all layers: which models and steps take it, and what a plan stands for.

The kernel runs on a GPU alone; here plain torch computes what it would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_plan import fake_plans
from family_models import family_model
from packed_models import install, quantize
from support import assert_native_parity, batch, random_prompts, tiny_model
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged.kernels.build import compiling
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.models import one_launch
from hf_paged.models.one_launch import OneLaunch, Rows

MODELS = {
    "qwen3": partial(tiny_model, head_dim=128), "llama": partial(family_model, "llama", head_dim=128),
}


@pytest.fixture
def plans(monkeypatch):
    plans = fake_plans(monkeypatch)
    yield plans
    assert not any(plan.conflicts for plan in plans.made), "a row reads what another one writes"


def enabled(make=MODELS["qwen3"], **options):
    return hf_paged.enable(make(), strict=True, **options)


def executor_of(model):
    return hf_paged.get_engine(model)._executor


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_request_alone_decodes_by_one_launch_and_makes_stocks_tokens(plans, make):
    model = enabled(make)
    assert_native_parity(model, **batch([21]), max_new_tokens=8, do_sample=False)
    assert plans.rows == [1] * 7, "the first token is the prompt's"
    assert len(plans.made) == 1


def test_the_row_that_is_left_alone_goes_on_by_one_launch(plans):
    with hf_paged.PagedGenerator(MODELS["qwen3"](), num_blocks=100, max_num_seqs=4) as generator:
        prompts = random_prompts([9, 17, 30])
        lengths = [3, 12, 5]
        for prompt, length in zip(prompts, lengths, strict=True):
            generator.engine.add_request(prompt, GenerationConfig(max_new_tokens=length, do_sample=False))
        made = {}
        while generator.engine.has_unfinished():
            for output in generator.engine.step():
                if output.completion is not None:
                    made[tuple(output.completion.prompt_token_ids)] = output.completion.token_ids
        assert plans.rows.count(1) >= 7 and plans.rows.count(2) >= 2, "three rows at first"
    with hf_paged.PagedGenerator(MODELS["qwen3"](), num_blocks=100, max_num_seqs=4, one_launch=False) as generator:
        for prompt, length in zip(prompts, lengths, strict=True):
            alone = generator.generate([prompt], max_new_tokens=length, do_sample=False, use_tqdm=False)
            assert alone[0].token_ids == made[tuple(prompt)]


def test_a_prompt_that_is_in_the_cache_but_for_its_last_token(plans):
    model = enabled()
    for _ in range(2):
        assert_native_parity(model, **batch([33]), max_new_tokens=4, do_sample=False)
    assert plans.rows.count(1) >= 6


def a_bias(model):
    model.model.layers[1].self_attn.o_proj.bias = nn.Parameter(torch.zeros(64))


def another_epsilon(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-5


def another_final_epsilon(model):
    model.model.norm.variance_epsilon = 1e-5


def another_scale(model):
    model.model.layers[0].self_attn.scaling *= 1.5


def reason_in(caplog):
    found = [record.args[-1] for record in caplog.records if "layer by layer" in record.msg]
    assert found
    return found[-1]


CHANGES = [a_bias, another_epsilon, another_final_epsilon, another_scale]


REASONS = dict(zip(CHANGES, ["biases", "several epsilons", "several epsilons", "several scales"], strict=True))


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_the_kernel_does_not_compute_run_one_by_one(plans, caplog, change):
    """The log says why."""
    caplog.set_level("INFO", "hf_paged")
    model = MODELS["qwen3"]()
    change(model)
    hf_paged.enable(model)
    model.generate(**batch([9]), max_new_tokens=4, do_sample=False)
    assert not executor_of(model).may_use_one_launch(1, np.array([5])) and not plans.made
    assert f"layer by layer: {reason_in(caplog)}" in caplog.text and REASONS[change] in reason_in(caplog)


OPTIONS = [{"one_launch": False}, {"fused_kernels": False}, {"merge_weights": False}]


@pytest.mark.parametrize("off", OPTIONS, ids=lambda off: next(iter(off)))
def test_a_technique_that_is_off(plans, off):
    model = enabled(**off)
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert not plans.made


MAKES = {
    "experts": partial(family_model, "qwen3-moe"),
    "a window": partial(tiny_model, head_dim=128, use_sliding_window=True, sliding_window=32, max_window_layers=1),
    "biases": partial(tiny_model, head_dim=128, attention_bias=True),
}


@pytest.mark.parametrize("what", MAKES)
def test_models_that_are_not_for_it(plans, caplog, what):
    """The log says why."""
    caplog.set_level("INFO", "hf_paged")
    model = enabled(MAKES[what])
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert not executor_of(model).may_use_one_launch(1, np.array([5])) and not plans.made
    assert what in reason_in(caplog)


@pytest.mark.parametrize("lengths", [[9, 12], [9, 17, 30, 4], [3, 4, 5, 6, 7, 8, 9, 10]], ids=len)
def test_steps_of_few_rows(plans, lengths):
    model = enabled()
    assert_native_parity(model, **batch(lengths), max_new_tokens=5, do_sample=False)
    assert plans.rows == [len(lengths)] * 4 and len(plans.made) == 1


@pytest.mark.parametrize("count", [3, 5, 9])
def test_other_numbers_of_rows_run_layer_by_layer(plans, count):
    """Where steps are graphs they are padded to the next number."""
    model = enabled()
    assert_native_parity(model, **batch([9] * count), max_new_tokens=5, do_sample=False)
    assert not plans.made


def test_rows_of_very_different_lengths_run_layer_by_layer(plans, monkeypatch):
    """Most programs would wait for those of the long row."""
    monkeypatch.setattr(support, "_MOST_IDLE_POSITIONS", 30)
    model = enabled()
    assert_native_parity(model, **batch([9, 90]), max_new_tokens=5, do_sample=False)
    assert not plans.made
    assert_native_parity(model, **batch([79, 90]), max_new_tokens=5, do_sample=False)
    assert plans.rows == [2] * 4


def test_each_number_of_rows_has_a_plan_and_a_kernel_of_its_own(monkeypatch):
    step = Step(monkeypatch)
    step.plans.compiled = Pending()
    assert step.run() is None
    step.plans.compiled = None
    assert step.run(count=2) is not None and len(step.plans.made) == 2
    assert step.one.is_ready(2) and not step.one.is_ready(1) and not step.one.is_ready(4)
    step.plans.is_captured = True
    assert step.run(count=4) is None and len(step.plans.made) == 2


def test_a_prompt_of_few_tokens_is_no_step_of_as_many_rows(plans):
    model = enabled()
    assert_native_parity(model, **batch([4]), max_new_tokens=4, do_sample=False)
    assert plans.rows == [1] * 3


def test_prompts_of_which_one_reads_what_the_other_writes_are_no_decode_rows(plans):
    """Each has one new token in the second step, and the second prompt's prefix is the block that the first fills."""
    first = random_prompts([32])[0]
    made = []
    for one_launch_on in (False, True):
        with hf_paged.PagedGenerator(MODELS["qwen3"](), num_blocks=100, max_num_seqs=4, max_num_batched_tokens=31,
                                     one_launch=one_launch_on) as generator:
            made.append([one.token_ids for one in generator.generate(
                [first, [*first, 7]], max_new_tokens=6, do_sample=False, use_tqdm=False)])
    assert made[0] == made[1] and set(plans.rows) == {2}


def test_guesses_of_one_sequence_are_several_rows(plans):
    model = enabled()
    prompt = torch.tensor([[5, 6, 7, 8] * 6])
    assert_native_parity(model, input_ids=prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert set(plans.rows) <= {1}


def test_autocast_runs_layer_by_layer(plans):
    model = enabled()
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**batch([9]), max_new_tokens=4, do_sample=False)
    assert not plans.made


def test_copies_of_4bit_weights_are_read_in_place_of_these(plans, monkeypatch):
    install(monkeypatch)
    model = enabled(lambda: quantize(MODELS["qwen3"]()), dequantize=True)
    assert_native_parity(model, **batch([21]), max_new_tokens=8, do_sample=False)
    assert plans.rows == [1] * 7


def test_a_lora_adapter_runs_layer_by_layer(plans):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(MODELS["qwen3"](), peft.LoraConfig(target_modules=["down_proj"], r=2))
    hf_paged.enable(model, strict=True)
    model.generate(**batch([9]), max_new_tokens=4, do_sample=False)
    assert not plans.made


def repoint(parameter):
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("path", [
    "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
    "model.layers.1.self_attn.k_norm.weight", "model.layers.0.input_layernorm.weight",
])
def test_the_plan_is_made_anew_where_a_weight_lies_elsewhere(plans, path):
    model = enabled()
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    repoint(model.get_parameter(path))
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert [len(plan.rows) for plan in plans.made] == [3, 3]


def test_a_weight_that_changes_in_place_is_read(plans):
    model = enabled()
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert len(plans.made) == 1


def test_the_plan_is_made_anew_where_the_cache_has_grown(plans):
    model = enabled()
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    cache = hf_paged.get_engine(model)._core.pool.runner.cache
    before = cache.version
    cache.grow(cache.num_blocks + 8)
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert cache.version > before and [len(plan.rows) for plan in plans.made] == [3, 3]


def test_what_was_let_go_is_made_anew(plans):
    model = enabled()
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    executor = executor_of(model)
    executor.drop_references()
    assert executor._one_launch._plans == {} and executor.uses_one_launch(1)
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    assert len(plans.made) == 2


def test_own_tensors_do_not_hold_the_plan(plans):
    """Where one of them changes, requests would be computed again."""
    model = enabled()
    assert_native_parity(model, **batch([9]), max_new_tokens=4, do_sample=False)
    (plan,) = plans.made
    assert all(tensor is not plan.epoch for tensor in executor_of(model).own_tensors())


class Step:
    """`OneLaunch` and what a step hands it."""

    def __init__(self, monkeypatch):
        self.plans = fake_plans(monkeypatch)
        executor = executor_of(model := enabled())
        assert_native_parity(model, **batch([9]), max_new_tokens=2, do_sample=False)
        self.model, (plan,) = model, self.plans.made
        self.decoder, self.executor = plan.decoder, executor
        self.one, self.plans.made[:] = OneLaunch(torch.device("cpu")), []

    def run(self, count=1, **changed):
        decoder = self.decoder._replace(**changed)
        rope, table = self.executor._rope, torch.zeros(2, 4, dtype=torch.int32)
        rows = Rows(rope.cos, rope.sin, torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64),
                    torch.full((count,), -1), table)
        return self.one.run(decoder, torch.ones(count, 64), rows)


def test_no_plan_is_made_while_a_graph_is_captured_or_in_a_dry_run(monkeypatch):
    step = Step(monkeypatch)
    step.plans.is_captured = True
    assert step.run() is None
    step.plans.is_captured = False
    made = []
    dry = compiling._DryRun()
    dry.run(lambda: made.append(step.run()))
    dry.pool.shutdown()
    assert made == [None] and not step.plans.made
    assert step.run() is not None and len(step.plans.made) == 1


def test_a_capture_takes_the_plan_of_the_run_before_and_keeps_what_that_allocated(monkeypatch):
    step = Step(monkeypatch)
    assert step.run() is not None and step.one.captured_tensors() == []
    step.plans.is_captured = True
    assert step.run() is not None
    (kept,) = step.one.captured_tensors()
    assert kept is step.plans.made[0].epoch and step.one.captured_tensors() == []
    assert step.run(eps=0.1) is None, "of another model there is no plan"


class Pending(Future):
    """A result that nobody asks for before it is there."""

    def result(self, timeout=None):
        assert self.done()
        return super().result(timeout)


def test_nobody_waits_for_the_compiler(monkeypatch):
    step = Step(monkeypatch)
    step.plans.compiled = Pending()
    assert step.run() is None and not step.one.is_ready(1)
    assert step.run() is None and len(step.plans.made) == 1
    step.plans.compiled.set_result(None)
    assert step.run() is None and not step.one.is_ready(1), "requests go on as they began"
    step.one.look_again()
    assert step.one.is_ready(1)
    step.plans.is_captured = True
    assert step.run() is None, "a first launch loads the kernel, which no graph can hold"
    step.plans.is_captured = False
    assert step.run() is not None


def test_a_kernel_that_does_not_compile_is_not_asked_for_again(monkeypatch, caplog):
    step = Step(monkeypatch)
    step.plans.compiled = Future()
    step.plans.compiled.set_exception(RuntimeError("no such instruction"))
    assert step.run() is None and step.run() is None and not step.one.is_ready(1)
    assert caplog.text.count("no such instruction") == 1 and len(step.plans.made) == 1
    assert "no such instruction" in support.why_not_on(torch.device("cpu"))


def test_a_launch_that_is_refused_is_not_tried_again(monkeypatch, caplog):
    """An enabled model goes on layer by layer, in the same step."""
    plans = fake_plans(monkeypatch)
    model = enabled()
    tries = []

    def refused(*_):
        tries.append(1)
        raise RuntimeError("cooperative launch too large")

    monkeypatch.setattr("fake_plan.FakePlan.run", refused)
    assert_native_parity(model, **batch([9]), max_new_tokens=5, do_sample=False)
    assert tries == [1] and caplog.text.count("cooperative launch too large") == 1 and len(plans.made) == 1


def test_out_of_memory_says_nothing_of_the_kernel(monkeypatch):
    step = Step(monkeypatch)

    def no_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fake_plan.FakePlan.run", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step.run()
    assert support.why_not_on(torch.device("cpu")) is None


def test_no_memory_for_a_plan_is_no_error_of_the_call_and_it_is_tried_again(monkeypatch):
    step = Step(monkeypatch)
    plan_of, tries = support.plan_of, []

    def no_memory_once(*args):
        tries.append(args)
        if len(tries) == 1:
            raise torch.OutOfMemoryError
        return plan_of(*args)

    monkeypatch.setattr(support, "plan_of", no_memory_once)
    assert step.run() is None and step.run() is not None and len(tries) == 2


def test_where_no_thread_can_compile_the_layers_run_one_by_one(monkeypatch, caplog):
    step = Step(monkeypatch)

    def no_thread(run):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(one_launch, "compiled_ahead", no_thread)
    assert step.run() is None and step.run() is None and caplog.text.count("can't start new thread") == 1


def test_layers_that_it_does_not_take_are_looked_at_once(monkeypatch):
    step = Step(monkeypatch)
    asked = []

    def refuse(decoder, rows):
        asked.append(decoder)
        raise ValueError("hidden=64")

    monkeypatch.setattr(support, "plan_of", refuse)
    assert step.run() is None and step.run() is None and len(asked) == 1 and not step.one.is_ready(1)
    assert support.why_not_on(torch.device("cpu")) is None


def test_a_bias_that_came_between_steps_is_seen(plans):
    model = enabled()
    model.generate(**batch([9]), max_new_tokens=3, do_sample=False)
    executor, cache = executor_of(model), hf_paged.get_engine(model)._core.pool.runner.cache
    slots, table = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    step = SimpleNamespace(adapters=None, decode_rows=(slots, table), positions=torch.zeros(1, dtype=torch.int64),
                           slot_mapping=torch.full((1,), -1), kv_cache=lambda i: cache.layers[i])
    assert executor._run_at_once(torch.ones(1, 64), step) is not None
    a_bias(model)
    assert executor._run_at_once(torch.ones(1, 64), step) is None


class Meddler(BaseStreamer):
    """A caller's code, which runs between steps."""

    def __init__(self, model):
        self.model, self.left = model, 3

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.model.model.layers[0].input_layernorm.variance_epsilon = 0.5

    def end(self):
        pass


def test_an_epsilon_that_changes_between_steps_is_seen(plans):
    """From then on the layers run one by one."""
    model = enabled(overlap=False)
    model.generate(**batch([9]), max_new_tokens=8, do_sample=False, streamer=Meddler(model))
    assert 0 < len(plans.rows) < 4


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")
def test_the_kernel_is_compiled_elsewhere_and_found_on_the_disk_by_the_next_process(tmp_path):
    """By Triton's own compiler, for a GPU that is not there: what is compiled ahead is what the launch asks for."""
    pytest.importorskip("triton.experimental.gluon")
    script, tests = Path(__file__).with_name("one_launch_script.py"), Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    name = "layers_kernel"
    assert not found["missing"]["made"]
    assert [[kernel, thread != "MainThread"] for kernel, thread, _ in found["meanwhile"]["compiled"]] == [[name, True]]
    assert found["meanwhile"]["launched"] == []
    assert found["requests run"] == {"made": False, "compiled": [], "launched": []}
    assert found["there"] == {"made": True, "compiled": [], "launched": [name]}
    assert found["on the disk"] == {"made": True, "compiled": [[name, "MainThread", True]], "launched": [name]}
