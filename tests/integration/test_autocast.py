"""Calls under autocast: stock's tokens and log-probabilities, by whichever way autocast comes about.

Weights of two dtypes, with and without autocast, by a context manager around `generate` and by the wrapper that
accelerate puts around a model's forward. What stock does under the same conditions is the oracle.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from family_models import VARIANTS, family_model
from support import (
    LOGITS,
    assert_idle,
    assert_native_parity,
    assert_near,
    assert_same_but_for_near_ties,
    assert_same_tensor,
    batch,
    random_prompts,
    run_out,
    stock_copy,
    tiny_model,
)
from threads import run_threads
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
OPTIONS = {"max_new_tokens": 10}
PROMPT = {key: torch.tensor(random_prompts([40])) if key == "input_ids" else torch.ones(1, 40, dtype=torch.int64)
          for key in ("input_ids", "attention_mask")}


def wrapped(model: Any, cast: torch.dtype | None) -> Any:
    """As accelerate's `prepare` leaves a model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16" if cast is BRAIN else "no", cpu=True)
    if cast is HALF:  # accelerate asks for a GPU; this is what it would do with one
        from accelerate.utils import convert_outputs_to_fp32

        forward = torch.autocast("cpu", HALF)(model.forward.__func__)
        model.forward = convert_outputs_to_fp32(forward.__get__(model))
        return model
    return accelerator.prepare_model(model)


class Way:
    """How a model is called under autocast to a dtype, None being no autocast."""

    def __init__(self, name: str, cast: torch.dtype | None) -> None:
        self.name, self.cast = name, cast

    def prepared(self, model: Any) -> Any:
        return wrapped(model, self.cast) if self.name == "wrapper" else model

    def around(self) -> Any:
        if self.name == "wrapper" or self.cast is None:
            return nullcontext()
        return torch.autocast("cpu", self.cast)


WAYS = [pytest.param(Way(name, cast), id=f"{name}-{str(cast).removeprefix('torch.')}")
        for name in ("wrapper", "context") for cast in (None, BRAIN, HALF)]


def with_adapters(model: Any, dtype: torch.dtype) -> Any:
    """The causal LM inside of a `PeftModel`, whose adapters are no longer nothing."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter, dtype=dtype) * 0.2
    return wrapped.get_base_model().eval()


# What a model is made of.
BASES: dict[str, Callable[[], Any]] = {
    "fp32": tiny_model,
    "bf16": lambda: tiny_model().bfloat16(),
    "fp32, fp32 adapters": lambda: with_adapters(tiny_model(), FULL),
    "bf16, fp32 adapters": lambda: with_adapters(tiny_model().bfloat16(), FULL),
    "bf16, bf16 adapters": lambda: with_adapters(tiny_model().bfloat16(), BRAIN),
}


@pytest.fixture(autouse=True)
def _no_accelerator_left():
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", BASES)
def test_tokens_are_stocks(base, way):
    expected = []
    stock = way.prepared(BASES[base]())
    with way.around():
        for kwargs in (LOGITS, {"num_beams": 3}, {"do_sample": True, "top_k": 1} | LOGITS):
            expected.append(stock.generate(**PROMPT, **OPTIONS, **kwargs))
    model = hf_paged.enable(way.prepared(BASES[base]()), strict=True)
    with way.around():
        assert_native_parity(model, expected[0], **PROMPT, **OPTIONS)
        assert_same_tensor(model.generate(**PROMPT, **OPTIONS, num_beams=3), expected[1])
        assert_same_but_for_near_ties(model.generate(**PROMPT, **OPTIONS, do_sample=True, top_k=1), expected[2])
    assert_idle(model)


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", BASES)
def test_log_probabilities_are_no_further_from_full_precision_than_stocks(base, way):
    prompts = random_prompts([60, 33, 47], seed=3)
    model = BASES[base]()
    exact, errors = copy.deepcopy(model).float(), {"stock": [], "ours": []}
    stock = way.prepared(copy.deepcopy(model))
    with way.around(), hf_paged.PagedGenerator(way.prepared(model)) as generator:
        found = generator.generate(prompts, max_new_tokens=1, prompt_logprobs=True)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            wanted = scored(exact(ids).logits, ids)
            with way.around():
                errors["stock"].append((scored(stock(ids).logits, ids) - wanted).abs())
        errors["ours"].append((torch.tensor(completion.prompt_logprobs[1:]) - wanted).abs())
    mean = {name: torch.cat(parts).mean().item() for name, parts in errors.items()}
    assert mean["ours"] <= 1.1 * mean["stock"] + 1e-6
    if base == "fp32" and way.cast is not None:
        assert mean["ours"] > 1e-4  # nothing was computed in full precision instead


def scored(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(variant):
    """Those that are not fused, and experts, run as their modules stand, under torch's own autocast."""
    stock, model = family_model(variant), hf_paged.enable(family_model(variant), strict=True)
    with torch.autocast("cpu", BRAIN):
        expected = stock.generate(**PROMPT, max_new_tokens=4, pad_token_id=0, **LOGITS)
        assert_same_but_for_near_ties(model.generate(**PROMPT, max_new_tokens=4, pad_token_id=0), expected)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 4
    assert_same_tensor(model.generate(**PROMPT, max_new_tokens=4, pad_token_id=0),
                       stock.generate(**PROMPT, max_new_tokens=4, pad_token_id=0))


MIXTURES: dict[str, Callable[[Any], Any]] = {
    "fp32 norms": lambda name: "norm" in name,
    "fp32 head norms": lambda name: "q_norm" in name or "k_norm" in name,
    "fp32 embedding": lambda name: "embed" in name or "lm_head" in name,
    "fp32 MLP": lambda name: "mlp" in name,
    "one fp32 projection": lambda name: "layers.0.self_attn.k_proj" in name,
}


@pytest.mark.each_value
@pytest.mark.parametrize("cast", [BRAIN, HALF])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_weights_of_two_dtypes(mixture, cast):
    def mixed():
        model = tiny_model(tie_word_embeddings=False, attention_bias=True).bfloat16()
        for name, parameter in model.named_parameters():
            if MIXTURES[mixture](name):
                parameter.data = parameter.data.float()
        return model

    stock, model = mixed(), hf_paged.enable(mixed(), strict=True)
    with torch.autocast("cpu", cast):
        expected = stock.generate(**PROMPT, **OPTIONS, **LOGITS)
        assert_native_parity(model, expected, **PROMPT, **OPTIONS)
    assert_idle(model)


@pytest.mark.parametrize("techniques", [{"fused_kernels": False}, {"merge_weights": False}, {"overlap": True}])
def test_without_each_technique(techniques):
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True, **techniques)
    with torch.autocast("cpu", BRAIN):
        assert_native_parity(model, stock.generate(**PROMPT, **OPTIONS, **LOGITS), **PROMPT, **OPTIONS)


# -- weights that change ------------------------------------------


def unnoticed(model: Any) -> None:
    """As a fused optimizer writes: no counter says so."""
    for parameter in model.parameters():
        parameter.data.mul_(1.05).add_(0.01)


def counted(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05).add_(0.01)


def replaced(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach() * 1.05 + 0.01)


CHANGES = {"unnoticed": unnoticed, "counted": counted, "replaced": replaced}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_calls(change, caching):
    model = hf_paged.enable(tiny_model(), strict=True, enable_prefix_caching=caching)
    seen = []
    with torch.autocast("cpu", BRAIN):
        for _ in range(3):
            seen.append(assert_native_parity(model, stock_copy(model).generate(**PROMPT, **OPTIONS), **PROMPT,
                                             **OPTIONS))
            CHANGES[change](model)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("change", CHANGES)
def test_weights_of_modules_that_run_as_they_stand(change):
    """torch would keep their casts as long as the caller's context is open."""
    model = hf_paged.enable(family_model("gemma3"), strict=True)
    options, seen = OPTIONS | {"pad_token_id": 0}, []
    with torch.autocast("cpu", BRAIN):
        for _ in range(2):
            seen.append(assert_native_parity(model, stock_copy(model).generate(**PROMPT, **options), **PROMPT,
                                             **options))
            CHANGES[change](model)
    assert not torch.equal(*seen)


def test_weights_that_change_while_others_run():
    """A prompt that comes after the change is computed with the weights of that moment, as without copies."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    first, second = random_prompts([30, 40], seed=5)
    config = GenerationConfig(max_new_tokens=12)
    with torch.autocast("cpu", BRAIN):
        engine.add_request(first, config)
        for _ in range(3):
            engine.step()
        unnoticed(model)
        expected = stock_copy(model).generate(input_ids=torch.tensor([second]), max_new_tokens=12)
        late = engine.add_request(second, config)
        completions = {}
        completions |= {o.request_id: o.completion for o in run_out(engine) if o.completion is not None}
    assert completions[late].token_ids == expected[0, 40:].tolist()


class Meddling(LogitsProcessor):
    """Changes the weights in the middle of a call."""

    def __init__(self, model: Any, at: int) -> None:
        self.model, self.at, self.count = model, at, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == self.at:
            counted(self.model)
        return scores


def test_weights_that_a_processor_changes():
    """It runs in lockstep; the next forward is one with the weights of that moment.

    With a context around the call stock would go on with the casts that torch keeps until it is left.
    """
    stock, model = wrapped(tiny_model(), BRAIN), hf_paged.enable(wrapped(tiny_model(), BRAIN), strict=True)
    plain = stock.generate(**PROMPT, **OPTIONS)
    expected, actual = (one.generate(**PROMPT, **OPTIONS, logits_processor=LogitsProcessorList([Meddling(one, 4)]),
                                     **more) for one, more in ((stock, LOGITS), (model, {})))
    assert_same_but_for_near_ties(actual, expected)
    assert not torch.equal(actual, plain)


def test_a_shape_that_changes_between_calls():
    model = hf_paged.enable(tiny_model(), strict=True)
    with torch.autocast("cpu", BRAIN):
        model.generate(**PROMPT, **OPTIONS)
        model.resize_token_embeddings(300)
        assert_native_parity(model, stock_copy(model).generate(**PROMPT, **OPTIONS, **LOGITS), **PROMPT, **OPTIONS)


# -- the trainer's state ------------------------------------------


def test_the_trainers_state_is_untouched_and_memory_given_back():
    stock, model = tiny_model(), tiny_model()
    before = [(p.data_ptr(), p.dtype, p.untyped_storage().nbytes()) for p in model.parameters()]
    losses: dict[str, list[float]] = {"stock": [], "ours": []}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (stock, model)]
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    made = []
    for _ in range(3):
        for name, one, optimizer in zip(losses, (stock, model), optimizers, strict=True):
            with torch.autocast("cpu", BRAIN):
                made.append(one.generate(**PROMPT, **OPTIONS, **(LOGITS if one is stock else {})))
                loss = one(input_ids=PROMPT["input_ids"], labels=PROMPT["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        assert_same_but_for_near_ties(made[-1], made[-2])
    assert losses["ours"] == losses["stock"]
    linears = {p.data_ptr(): p.numel() for n, p in model.named_parameters() if "proj" in n or "embed" in n}
    assert engine.stats().shadow_bytes == 2 * sum(linears.values())
    engine.release_memory()
    assert engine.stats().shadow_bytes == 0
    assert engine._executor.own_tensors() == []
    for ours, theirs in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    for ours, theirs in zip(*(o.state_dict()["state"].values() for o in optimizers), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert [(p.data_ptr(), p.dtype, p.untyped_storage().nbytes()) for p in model.parameters()] == before


def test_autocast_of_a_caller_keeps_no_weights_of_ours():
    """torch caches cast weights while a context is open; one made without gradients would cut a later loss off."""
    stock, model = family_model("gemma3"), hf_paged.enable(family_model("gemma3"), strict=True)
    grads = []
    for one in (stock, model):
        with torch.autocast("cpu", BRAIN):
            if one is model:
                one.generate(**PROMPT, **OPTIONS, pad_token_id=0)
            one(input_ids=PROMPT["input_ids"], labels=PROMPT["input_ids"]).loss.backward()
        grads.append([p.grad for p in one.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


# -- several calls ------------------------------------------


def test_calls_in_turn_with_and_without_autocast():
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True)
    for cast in (None, BRAIN, None, HALF, BRAIN, BRAIN):
        with torch.autocast("cpu", cast) if cast else nullcontext():
            assert_native_parity(model, stock.generate(**PROMPT, **OPTIONS, **LOGITS), **PROMPT, **OPTIONS)
            assert (hf_paged.get_engine(model).stats().shadow_bytes > 0) == (cast is not None)


def test_keys_and_values_of_one_precision_serve_no_call_of_another():
    """bf16 weights with an fp32 norm: pages are bf16 with autocast and without it, their content is another."""
    model = hf_paged.enable(tiny_model().bfloat16(), strict=True)
    engine = hf_paged.get_engine(model)
    keys = {engine._executor.state_key()}
    for cast in (BRAIN, HALF):
        engine._executor.autocast = cast
        keys.add(engine._executor.state_key())
    assert len(keys) == 3


def test_the_same_precision_shares_the_prefix_cache():
    model = hf_paged.enable(tiny_model(), strict=True)
    with torch.autocast("cpu", BRAIN):
        for _ in range(2):
            model.generate(**PROMPT, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits >= 32


def test_requests_are_computed_as_they_were_asked_for_whoever_drives():
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True)
    engine, config = hf_paged.get_engine(model), GenerationConfig(**OPTIONS)
    prompt = PROMPT["input_ids"][0].tolist()
    with torch.autocast("cpu", BRAIN):
        expected = stock.generate(**PROMPT, **OPTIONS, **LOGITS)
        engine.add_request(prompt, config)
    results = []

    def drive():
        while engine.has_unfinished():
            results.extend(o.completion.token_ids for o in engine.step() if o.completion is not None)

    thread = threading.Thread(target=drive)  # outside of autocast
    thread.start()
    thread.join()
    assert_same_but_for_near_ties(torch.tensor([prompt + ids for ids in results]), expected)


def test_a_call_beside_others_of_another_precision_goes_to_stock():
    stock, model = tiny_model(), hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    engine.add_request(PROMPT["input_ids"][0].tolist(), GenerationConfig(max_new_tokens=30))
    engine.step()
    with torch.autocast("cpu", BRAIN):
        expected = stock.generate(**PROMPT, **OPTIONS, **LOGITS)
        explanation = hf_paged.explain(model, **PROMPT, **OPTIONS)
        assert explanation.path == "stock"
        assert "other calls run without autocast at the same time, and this one under" in explanation.reasons[0]
        with pytest.warns(hf_paged.FallbackWarning, match="other calls run without autocast"):
            assert_same_tensor(model.generate(**PROMPT, **OPTIONS), expected.sequences)
        with pytest.raises(hf_paged.UnsupportedModelError, match="other calls run without autocast"):
            engine.add_request([1, 2, 3])
    found = []
    while engine.has_unfinished():
        found += [o.completion.token_ids for o in engine.step() if o.completion is not None]
    assert found == [stock.generate(**PROMPT, max_new_tokens=30)[0, 40:].tolist()]
    with torch.autocast("cpu", BRAIN):
        assert_native_parity(model, expected, **PROMPT, **OPTIONS)


def test_threads_of_different_precisions_each_get_their_own_tokens():
    """Whether natively or in stock; none of them waits for good."""
    stock, model = tiny_model(), hf_paged.enable(tiny_model())
    inputs = batch([21, 9])
    expected, wrong = {}, []
    for cast in (None, BRAIN):  # two casts at once torch mixes up in stock: threads share what it keeps of them
        with torch.autocast("cpu", cast) if cast else nullcontext():
            expected[cast] = stock.generate(**inputs, **OPTIONS, **LOGITS)

    def work(cast):
        try:
            for _ in range(5):
                with torch.autocast("cpu", cast) if cast else nullcontext():
                    assert_same_but_for_near_ties(model.generate(**inputs, **OPTIONS), expected[cast], cast or FULL)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(cast,)) for cast in expected for _ in range(2)]
    run_threads(threads, timeout=120)
    assert wrong == []
    assert_idle(model)


# -- what else a call may ask for ------------------------------------------


@pytest.mark.parametrize("options", [
    LOGITS | {"output_scores": True}, LOGITS | {"use_cache": False}, {"num_beams": 2, "use_cache": False},
    {"num_beams": 2},
])
def test_scores_and_logits(options):
    """Whatever stock gives; a cache that lockstep would have to return in another dtype is stock's."""
    stock, model = tiny_model(), hf_paged.enable(tiny_model())
    kwargs = PROMPT | OPTIONS | options | {"return_dict_in_generate": True}
    with torch.autocast("cpu", BRAIN):
        expected, actual = stock.generate(**kwargs), model.generate(**kwargs)
    if "num_beams" in options:
        assert_same_tensor(actual.sequences, expected.sequences)
    else:
        assert_same_but_for_near_ties(actual.sequences, expected)
    equal = int((actual.sequences == expected.sequences)[0].cumprod(0).sum()) - 40
    for name in ("scores", "logits"):
        steps = zip(actual.get(name) or (), expected.get(name) or (), strict=True)
        for ours, theirs in itertools.islice(steps, equal + 1):  # of the same tokens
            assert ours.dtype == theirs.dtype
            assert_near(ours, theirs, 0.05)
    assert ("past_key_values" in actual) == ("past_key_values" in expected)
    counts = hf_paged.get_engine(model).stats().calls
    assert counts["stock"].num_calls == ("num_beams" in options and "use_cache" not in options)
    if "past_key_values" in expected:
        for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert ours.keys.dtype == theirs.keys.dtype == torch.float32
            assert_near(ours.keys, theirs.keys, 0.05)


def test_the_cache_of_a_native_call_is_stocks():
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True)
    with torch.autocast("cpu", BRAIN):
        expected, actual = (one.generate(**PROMPT, **OPTIONS, return_dict_in_generate=True).past_key_values
                            for one in (stock, model))
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        assert ours.keys.dtype == theirs.keys.dtype == torch.float32
        assert_near(ours.keys, theirs.keys, 0.05)


def test_prompt_lookup_and_streams():
    stock, model = tiny_model(), hf_paged.enable(tiny_model(), strict=True)
    ids = PROMPT["input_ids"][:, :12].repeat(1, 3)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    with torch.autocast("cpu", BRAIN):
        assert_same_but_for_near_ties(model.generate(**kwargs, prompt_lookup_num_tokens=3),
                                      stock.generate(**kwargs, **LOGITS))


def test_generator_and_continuous_batching():
    """`generate_batch` runs in a thread of its own, where there is no autocast but a wrapper's."""
    prompts = random_prompts([20, 33])
    stock = wrapped(tiny_model(), BRAIN)
    expected = [stock.generate(input_ids=torch.tensor([p]), max_new_tokens=6, **LOGITS) for p in prompts]
    model = hf_paged.enable(wrapped(tiny_model(), BRAIN), strict=True)
    outputs = model.generate_batch(prompts, generation_config=GenerationConfig(max_new_tokens=6))
    made = [output.generated_tokens for output in outputs.values()]
    assert hf_paged.get_engine(model).stats().shadow_bytes > 0
    with hf_paged.PagedGenerator(wrapped(tiny_model(), BRAIN)) as generator:
        made += [c.token_ids for c in generator.generate(prompts, max_new_tokens=6)]
        assert len(list(generator.stream(prompts, max_new_tokens=6))) == 12
    for prompt, ids, wanted in zip(prompts * 2, made, expected * 2, strict=True):
        assert_same_but_for_near_ties(torch.tensor([prompt + ids]), wanted)


def test_train_mode_and_gradients_of_the_caller():
    stock, model = tiny_model().train(), hf_paged.enable(tiny_model().train(), strict=True)
    with torch.autocast("cpu", BRAIN), torch.enable_grad():
        assert_native_parity(model, stock.generate(**PROMPT, **OPTIONS, **LOGITS), **PROMPT, **OPTIONS)
