"""Hooks that read or edit activations, and generate in the middle of training with activation checkpointing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import assert_native_parity, assert_same_tensor, batch, stock_copy, tiny_model
from torch import nn

import hf_paged

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


# -- hooks ------------------------------------------


def _recording(seen: list[torch.Tensor]) -> Any:
    return lambda module, args, output: seen.append(output.detach().clone())


@pytest.mark.parametrize("path", ["model.layers.0", "model.layers.1.mlp", "model.layers.1.self_attn.q_proj"])
def test_a_hook_that_reads_sees_what_it_sees_in_stock(path):
    """Shapes are stock's padded [rows, tokens, features], and the values are bitwise stock's."""
    model, stock = tiny_model(), tiny_model()
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    stock.get_submodule(path).register_forward_hook(_recording(theirs))
    expected = stock.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    handle = model.get_submodule(path).register_forward_hook(_recording(ours))
    with pytest.warns(hf_paged.FallbackWarning, match=f"{path} has a forward hook"):
        assert_same_tensor(model.generate(**INPUTS, **OPTIONS), expected)
    assert [tuple(t.shape[:2]) for t in ours] == [(3, 40)] + [(3, 1)] * 7
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    handle.remove()
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    assert len(ours) == 8


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_steers_the_residual_stream(register):
    """Steering on, off, and on again: each time stock's tokens, and what was cached without it does not leak in."""
    model = tiny_model()
    direction = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 4

    def steer(module: nn.Module, args: tuple, output: Any = None) -> Any:
        return output + direction if output is not None else (args[0] + direction, *args[1:])

    plain = model.generate(**INPUTS, **OPTIONS)
    with_hook = stock_copy(model)
    getattr(with_hook.model.layers[0], register)(steer)
    steered = with_hook.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(steered, plain)
    hf_paged.enable(model)
    for count in (1, 2):
        assert_native_parity(model, plain, **INPUTS, **OPTIONS)
        handle = getattr(model.model.layers[0], register)(steer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_paged.FallbackWarning)
            assert_same_tensor(model.generate(**INPUTS, **OPTIONS), steered)
        reasons = hf_paged.get_engine(model).stats().calls["stock"].by_reason
        assert reasons["… has a forward hook"].num_calls == count
        handle.remove()
    assert_native_parity(model, plain, **INPUTS, **OPTIONS)


def test_a_hook_on_one_row_edits_that_row_only():
    """It counts on stock's batch: row 1 of three."""
    model = tiny_model()
    plain = model.generate(**INPUTS, **OPTIONS)

    def edit(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[1] *= -1
        return output

    hf_paged.enable(model)
    model.model.layers[1].register_forward_hook(edit)
    expected = stock_copy(model).generate(**INPUTS, **OPTIONS)
    with pytest.warns(hf_paged.FallbackWarning, match="hook"):
        actual = model.generate(**INPUTS, **OPTIONS)
    assert_same_tensor(actual, expected)
    assert [torch.equal(a, b) for a, b in zip(actual, plain, strict=True)] == [True, False, True]


# -- training ------------------------------------------


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    generator = torch.Generator().manual_seed(5)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return wrapped


def _plain(model: Any) -> Any:
    return model


def _gradients(model: Any, between: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step, with `between()` called after the forward and before the backward."""
    ids = batch([24, 24], seed=4)["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss
    between()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("wrap", [_plain, _lora])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_generate_between_forward_and_backward(wrap, reentrant):
    """With and without checkpointing, whose backward runs the layers' forward again. Gradients are bitwise stock's.

    In train mode checkpointed layers of stock drop their cache before transformers 5.24, so that call goes to stock; in
    eval mode, and with checkpointing switched off for the call as TRL does, it is native.
    """
    models = [wrap(tiny_model()), wrap(tiny_model())]
    for model in models:
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
    stock, ours = models
    expected = _gradients(stock, lambda: None)
    assert expected
    in_train_mode = stock.generate(**INPUTS, **OPTIONS)
    in_eval_mode = stock.eval().generate(**INPUTS, **OPTIONS)
    forgets = not torch.equal(in_train_mode, in_eval_mode)
    assert not (forgets and reentrant is None)
    hf_paged.enable(ours)
    engine = hf_paged.get_engine(ours)

    def generate() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same_tensor(ours.generate(**INPUTS, **OPTIONS), in_train_mode)
        reasons = [str(w.message) for w in caught if issubclass(w.category, hf_paged.FallbackWarning)]
        assert len(reasons) == forgets
        assert all("checkpoints activations in train mode" in reason for reason in reasons)
        made = engine.stats().num_generated_tokens
        ours.eval()
        assert_same_tensor(ours.generate(**INPUTS, **OPTIONS), in_eval_mode)
        assert engine.stats().num_generated_tokens == made + 3 * 8
        ours.train()

    actual = _gradients(ours, generate)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_checkpointing_switched_off_for_the_rollout():
    """As TRL's unwrap_model_for_generation does: native in train mode, the hook on the embedding still there."""
    model = tiny_model()
    expected = model.generate(**INPUTS, **OPTIONS)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    hf_paged.enable(model, strict=True)
    for _ in range(2):
        model.gradient_checkpointing_disable()
        assert_native_parity(model, expected, **INPUTS, **OPTIONS)
        model.gradient_checkpointing_enable()
    ids = INPUTS["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
