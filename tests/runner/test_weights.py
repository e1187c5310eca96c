"""After any change of the weights the next call equals stock on the new ones; without a change the cache is used."""

from __future__ import annotations

import pytest
import torch
from support import assert_native_parity, batch, random_prompts, run_out, stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.runner.weights import WeightsGuard

INPUTS = batch([70, 40])
CACHED = 64 + 32  # full blocks of both prompts


def _hits(model):
    return hf_paged.get_engine(model).stats().prefix_cache_hits


def _other(model):
    return tiny_model(7, tie_word_embeddings=model.config.tie_word_embeddings)


def _step(model, **options):
    """One optimizer step with a large rate, so that every answer changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    ids = torch.tensor(random_prompts([30]))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def _sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.tensor(random_prompts([30]))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def _load_state_dict(model):
    model.load_state_dict(_other(model).state_dict())


def _assign_state_dict(model):
    model.load_state_dict(_other(model).state_dict(), assign=True)
    model.tie_weights()


def _data_copy(model):
    for parameter, other in zip(model.parameters(), _other(model).parameters(), strict=True):
        parameter.data.copy_(other)


def _data_assign(model):
    for parameter, other in zip(model.parameters(), _other(model).parameters(), strict=True):
        parameter.data = other.data


def _one_data_element(model):
    model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 5.0


def _embedding_row(model):
    model.model.embed_tokens.weight.data[INPUTS["input_ids"][0, 3]] *= -1.0


def _last_norm_element(model):
    model.model.layers[-1].self_attn.k_norm.weight.data[-1] *= -8.0


def _numpy_write(model):
    model.model.layers[0].self_attn.v_proj.weight.detach().numpy()[5] *= -3.0


def _swapped_rows(model):
    """The same values at other places: a plain sum would not see it."""
    weight = model.model.layers[0].self_attn.v_proj.weight.data
    weight.copy_(weight.flip(0).clone())


def _swapped_layers(model):
    """The same tensors with their roles exchanged."""
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    a, b = first.v_proj.weight.data.clone(), second.v_proj.weight.data.clone()
    first.v_proj.weight.data.copy_(b)
    second.v_proj.weight.data.copy_(a)


def _negated(model):
    model.model.layers[0].self_attn.v_proj.weight.data.neg_()


def _new_parameter(model):
    model.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(
        tiny_model(7).model.layers[0].self_attn.v_proj.weight.detach().clone()
    )


def _new_module(model):
    model.model.layers[0] = tiny_model(7).model.layers[0]


def _buffer(model):
    model.model.rotary_emb.inv_freq.data.mul_(3.0)


CHANGES = [
    pytest.param(lambda m: _step(m, foreach=True), id="foreach AdamW"),
    pytest.param(lambda m: _step(m, fused=True), id="fused AdamW"),
    pytest.param(lambda m: _step(m, foreach=False), id="AdamW by loop"),
    *(pytest.param(f, id=f.__name__.strip("_")) for f in (
        _sgd, _load_state_dict, _assign_state_dict, _data_copy, _data_assign, _one_data_element, _embedding_row,
        _last_norm_element, _numpy_write, _swapped_rows, _swapped_layers, _negated, _new_parameter, _new_module,
        _buffer,
    )),
]


@pytest.mark.each_value
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_next_call_after_a_change_equals_stock_and_hits_nothing(change, tied):
    model = hf_paged.enable(tiny_model(tie_word_embeddings=tied), strict=True)
    first = assert_native_parity(model, **INPUTS, max_new_tokens=12)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    before = _hits(model)
    assert before == CACHED
    change(model)
    expected = stock_generate(model, **INPUTS, max_new_tokens=12)
    assert not torch.equal(expected, first), "the change does not show"
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == before
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == before + CACHED


def test_a_change_during_a_stream_is_seen_by_the_next_call():
    """A call that spans the change leaves keys of both weights behind: none of them may be served."""
    model = hf_paged.enable(tiny_model(), strict=True)

    class Changing:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 5:
                _one_data_element(model)

        def end(self):
            pass

    model.generate(**batch([70]), max_new_tokens=40, streamer=Changing())
    assert_native_parity(model, **batch([70]), max_new_tokens=12)


def test_weights_put_back_after_a_call_with_others():
    model = hf_paged.enable(tiny_model(), strict=True)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = assert_native_parity(model, **INPUTS, max_new_tokens=12)
    _data_copy(model)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(original[name])
    assert torch.equal(assert_native_parity(model, **INPUTS, max_new_tokens=12), first)


def test_a_change_between_calls_that_share_no_prompt_and_one_that_returns():
    """What was cached before the change must not be found two calls later either."""
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    _one_data_element(model)
    assert_native_parity(model, **batch([25], seed=9), max_new_tokens=12)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    assert_native_parity(model, **batch([25], seed=9), max_new_tokens=12)


def test_a_change_while_only_stock_calls_ran():
    model = hf_paged.enable(tiny_model())
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    with pytest.warns(hf_paged.FallbackWarning):
        model.generate(**INPUTS, max_new_tokens=3, prefill_chunk_size=4)
    _negated(model)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)


def test_casting_to_another_dtype_and_back():
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)
    model.bfloat16()
    assert_native_parity(model, **INPUTS, max_new_tokens=4)
    model.float()  # now with weights rounded to bf16
    assert_native_parity(model, **INPUTS, max_new_tokens=12)


def _comparisons(engine, monkeypatch):
    """How many requests ran whenever the checksum was waited for and compared."""
    running, verify = [], WeightsGuard.verify

    def counting(self, pool):
        running.append(engine.stats().num_running)
        verify(self, pool)

    monkeypatch.setattr(WeightsGuard, "verify", counting)
    return running


def test_the_checksum_is_compared_at_once_only_where_a_prompt_would_hit(monkeypatch):
    model = hf_paged.enable(tiny_model(), strict=True)
    running = _comparisons(hf_paged.get_engine(model), monkeypatch)
    model.generate(**INPUTS, max_new_tokens=2)
    model.generate(**batch([50, 60], seed=5), max_new_tokens=2)
    assert all(running)  # nothing to hit: the comparison could wait for the first step's tokens
    running.clear()
    model.generate(**INPUTS, max_new_tokens=2)
    assert running == [0]  # before anything was admitted


def test_without_prefix_caching_there_is_no_checksum(monkeypatch):
    model = hf_paged.enable(tiny_model(), strict=True, enable_prefix_caching=False)
    running = _comparisons(hf_paged.get_engine(model), monkeypatch)
    monkeypatch.setattr(WeightsGuard, "begin", lambda *args: running.append("began"))
    model.generate(**INPUTS, max_new_tokens=2)
    model.generate(**INPUTS, max_new_tokens=2)
    assert running == []


def test_counters_and_pointers_are_only_a_shortcut(monkeypatch):
    """With the checksum blinded, a write that bumps `_version` is still seen; one through `.data` is the checksum's."""
    monkeypatch.setattr(ChecksumPlan, "__call__", lambda self, tensors: torch.zeros(1, dtype=torch.int64))
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, max_new_tokens=8)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    assert_native_parity(model, **INPUTS, max_new_tokens=8)
    assert _hits(model) == 0
    _negated(model)
    model.generate(**INPUTS, max_new_tokens=8)
    assert _hits(model) == CACHED  # stale: this is what the checksum is for


def test_the_checksum_alone_notices_what_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "_version", 0)
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **INPUTS, max_new_tokens=8)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()
    assert_native_parity(model, **INPUTS, max_new_tokens=8)
    assert _hits(model) == 0


def _in_place(model):
    """Bumps `_version`."""
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.neg_()


@pytest.mark.parametrize(
    "change", [_in_place, _negated, lambda m: _step(m, fused=True)], ids=["version", "data", "fused"]
)
def test_a_change_while_another_request_keeps_the_engine_busy(change):
    """The engine does not become idle in between: prompts that arrive after the change must not hit what is older."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, **INPUTS, max_new_tokens=8)
    other = engine.add_request([1, 2, 3], GenerationConfig(max_new_tokens=200))
    engine.step()
    change(model)
    expected = stock_generate(model, **INPUTS, max_new_tokens=8)
    hits = _hits(model)
    actual = model.generate(**INPUTS, max_new_tokens=8)
    assert engine.stats().num_running == 1  # the other one still runs
    assert torch.equal(actual, expected)
    assert _hits(model) == hits
    engine.abort(other)


@pytest.mark.parametrize("change", [_in_place, _negated], ids=["version", "data"])
@pytest.mark.parametrize("arrivals", [False, True])
def test_what_a_request_caches_that_spans_a_change_is_not_served_later(change, arrivals):
    """Its first block is filled after the change, but begins with keys of the old weights."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    engine.add_request([1, 2, 3], GenerationConfig(max_new_tokens=60))
    tokens = [1, 2, 3] + [t for _ in range(4) for output in engine.step() for t in output.new_token_ids]
    change(model)
    if arrivals:
        assert_native_parity_while_busy(model)
    tokens += [t for output in run_out(engine) for t in output.new_token_ids]
    assert_native_parity(model, input_ids=torch.tensor([tokens]), max_new_tokens=12)


def assert_native_parity_while_busy(model):
    expected = stock_generate(model, **INPUTS, max_new_tokens=8)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=8), expected)


# -- what is no tensor ------------------------------------------


def _epsilons(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 2.0


def _scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.2


def _rope_scaling(model):
    model.model.rotary_emb.attention_scaling = 0.5


def _window(model):
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    model.config.sliding_window = 4


CONSTANTS = [
    pytest.param(change, id=change.__name__.strip("_"))
    for change in (_epsilons, _scaling, _rope_scaling, _window)
]


def _with_windows():
    model = tiny_model(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    return hf_paged.enable(model, strict=True)


@pytest.mark.parametrize("change", CONSTANTS)
def test_keys_computed_with_other_constants_are_not_hit(change):
    model = _with_windows()
    first = assert_native_parity(model, **INPUTS, max_new_tokens=12)
    change(model)
    expected = stock_generate(model, **INPUTS, max_new_tokens=12)
    assert not torch.equal(expected, first), "the change does not show"
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == 0
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == CACHED


@pytest.mark.each_value
@pytest.mark.parametrize("change", CONSTANTS)
@pytest.mark.parametrize("seen", [False, True])
def test_constants_changed_while_another_request_runs(change, seen):
    model = _with_windows()
    engine = hf_paged.get_engine(model)
    if seen:
        assert_native_parity(model, **INPUTS, max_new_tokens=8)
    other = engine.add_request([1, 2, 3], GenerationConfig(max_new_tokens=200))
    engine.step()
    change(model)
    expected = stock_generate(model, **INPUTS, max_new_tokens=8)
    hits = _hits(model)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=8), expected)
    assert _hits(model) == hits
    engine.abort(other)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("constant", ["scaling", "epsilon", "rope"])
def test_constants_changed_under_a_request_and_put_back_poison_nothing(constant, steps):
    """Its key was taken when it arrived, its keys and values are computed later: under other constants."""
    model = hf_paged.enable(tiny_model(), strict=True)
    engine = hf_paged.get_engine(model)
    attention = model.model.layers[0].self_attn
    owner, name, other = {
        "scaling": (attention, "scaling", 0.01),
        "epsilon": (model.model.layers[0].input_layernorm, "variance_epsilon", 30.0),
        "rope": (model.model.rotary_emb, "attention_scaling", 0.5),
    }[constant]
    prompt = INPUTS["input_ids"][0].tolist()
    before = getattr(owner, name)
    engine.add_request(prompt, GenerationConfig(max_new_tokens=40))
    tokens = prompt + [t for _ in range(steps) for output in engine.step() for t in output.new_token_ids]
    setattr(owner, name, other)
    tokens += [t for output in run_out(engine) for t in output.new_token_ids]
    setattr(owner, name, before)
    assert_native_parity(model, input_ids=torch.tensor([tokens]), max_new_tokens=12)
    assert_native_parity(model, **INPUTS, max_new_tokens=12)


# -- parameters of unusual kinds ------------------------------------------


def test_parameters_made_under_inference_mode():
    """They have no version counter; the checksum still sees their changes."""
    with torch.inference_mode():
        model = tiny_model()
    assert all(p.is_inference() for p in model.parameters())
    hf_paged.enable(model, strict=True)
    expected = tiny_model().generate(**INPUTS, max_new_tokens=12)
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == CACHED
    other = tiny_model()
    _one_data_element(other)
    with torch.inference_mode():
        _one_data_element(model)
    expected = other.generate(**INPUTS, max_new_tokens=12)
    assert_native_parity(model, expected, **INPUTS, max_new_tokens=12)
    assert _hits(model) == CACHED


class _Wrapped(torch.Tensor):
    """Holds its values in another tensor, as torchao's quantized weights do; its own memory is none."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_a_weight_of_a_wrapper_subclass():
    model = hf_paged.enable(tiny_model())
    up = model.model.layers[0].mlp.up_proj
    expected = stock_generate(model, **INPUTS, max_new_tokens=6)
    up.weight = torch.nn.Parameter(_Wrapped(up.weight.detach()), requires_grad=False)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=6), expected)
    up.weight.inner.neg_()
    changed = model.generate(**INPUTS, max_new_tokens=6)
    up.weight = torch.nn.Parameter(up.weight.inner.clone())
    assert torch.equal(changed, stock_generate(model, **INPUTS, max_new_tokens=6))
    assert not torch.equal(changed, expected)
