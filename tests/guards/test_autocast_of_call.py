"""Under which autocast a call is made: the caller's thread, or the wrapper around its model's forward."""

from __future__ import annotations

import threading
from types import MethodType

import pytest
import torch
from support import tiny_model

import hf_paged
from hf_paged.guards.replaced_forwards import autocast_of_call
from hf_paged.models import find_executor

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def test_of_the_thread():
    model = tiny_model()
    assert autocast_of_call(model) is None
    with torch.autocast("cpu", BRAIN):
        assert autocast_of_call(model) is BRAIN
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(autocast_of_call(model)))
        thread.start()
        thread.join()
        assert elsewhere == [None]
        with torch.autocast("cpu", HALF):
            assert autocast_of_call(model) is HALF
            with torch.autocast("cpu", enabled=False):
                assert autocast_of_call(model) is None
    with torch.autocast("cuda", BRAIN):  # of another device
        assert autocast_of_call(model) is None


@pytest.mark.each_value
@pytest.mark.parametrize(("contexts", "expected"), [
    ([("cpu", BRAIN, True)], BRAIN),
    ([("cpu", BRAIN, True), ("cpu", HALF, True)], HALF),  # the last is the innermost
    ([("cpu", BRAIN, True), ("cpu", HALF, False)], None),
    ([("cpu", BRAIN, True), ("cuda", HALF, True)], BRAIN),
    ([("cuda", HALF, True)], "the thread's"),
])
@pytest.mark.parametrize("ambient", [None, BRAIN, HALF])
def test_of_a_wrapper_around_the_forward(contexts, expected, ambient):
    """What a forward really computes in is the oracle."""
    model = tiny_model()
    for device, dtype, enabled in reversed(contexts):
        wrapped = torch.autocast(device, dtype, enabled=enabled)(model.forward.__func__)
        model.forward = MethodType(wrapped, model)
    with torch.autocast("cpu", ambient or BRAIN, enabled=ambient is not None), torch.no_grad():
        found = autocast_of_call(model)
        assert model(torch.tensor([[1, 2]])).logits.dtype == (found or FULL)
    assert found is (ambient if expected == "the thread's" else expected)


def test_autocast_to_what_all_weights_are_is_none():
    executor = find_executor(model := tiny_model().bfloat16())(model)
    with torch.autocast("cpu", BRAIN):
        assert executor.autocast_of_call() is None
        model.model.norm.weight.data = model.model.norm.weight.data.float()
        assert executor.autocast_of_call() is BRAIN
    with torch.autocast("cpu", HALF):
        assert executor.autocast_of_call() is HALF


def test_what_an_executor_says():
    executor = find_executor(model := tiny_model())(model)
    spec = executor.kv_spec()
    assert (spec.compute_dtype, spec.cache_dtype, executor.autocast) == (FULL, FULL, None)
    key = executor.state_key()
    executor.autocast = BRAIN
    spec = executor.kv_spec()
    assert (spec.compute_dtype, spec.cache_dtype, executor.autocast) == (FULL, BRAIN, BRAIN)
    assert executor.state_key() != key


def test_bytes_that_copies_will_take_are_those_that_they_take():
    """Kept apart from the KV pool before they are made."""
    executor = find_executor(model := tiny_model())(model)
    assert executor.bytes_to_come() == 0
    executor.autocast = BRAIN
    expected = executor.bytes_to_come()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert expected == sum(2 * linear.weight.numel() for linear in linears)
    executor.prepare(64)
    assert (executor.bytes_to_come(), executor.copied_bytes) == (0, expected)
    assert sum(tensor.nbytes for tensor in executor.own_tensors()) == expected
    executor.release()
    assert executor.copied_bytes == 0


def test_an_engine_starts_in_the_precision_that_its_maker_has():
    """Its pool is sized for it, and attention packages are asked about it."""
    with torch.autocast("cpu", BRAIN):
        engine = hf_paged.get_engine(model := hf_paged.enable(tiny_model()))
    assert engine._executor.kv_spec().cache_dtype is BRAIN
    hf_paged.disable(model)
