"""Faults that only models with a recurrent state have are found by their checks, on copies of LFM2 with a change."""

from __future__ import annotations

import inspect

import pytest
import torch
from recurrent_models import with_idiom
from transformers import Lfm2Config
from transformers.models.lfm2 import modeling_lfm2

from hf_paged.models.proof import prove
from hf_paged.models.proof.checks.prompts import check_prompts, generated_by_stock
from hf_paged.models.proof.checks.rows import check_other_rows
from hf_paged.models.proof.checks.states import check_batch, check_chunks
from hf_paged.models.proof.checks.token_operations import token_operations
from hf_paged.models.proof.clone import Double, clone_of
from hf_paged.models.proof.subject import subject_of
from hf_paged.models.proof.verdict import Refused
from tests.models.proof.planted import load_copy

pytestmark = with_idiom

BRANCH = "        if conv_state is not None and seq_len == 1 and not cache.is_recording_past(self.layer_idx):\n"
UPDATED = "        y = C * hidden_states\n"
# Lines in front of a line of `Lfm2ShortConv.forward`.
FAULTS = {
    "decode rows meet": (UPDATED, "if seq_len == 1:\n    hidden_states = hidden_states + 1e-4 * hidden_states.mean(0)"),
    "a chunk forgets the state": (
        BRANCH, "if seq_len > 1 and cache is not None and conv_state is not None:\n    conv_state.zero_()"),
    "long prompts differ": (
        UPDATED, "if seq_len > 90 and cache is not None:\n    hidden_states = hidden_states * 1.001"),
    "the number of rows counts": (
        UPDATED, "if hidden_states.shape[0] > 20:\n    hidden_states = hidden_states * 1.001"),
}


def small_config():
    return Lfm2Config(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=256,
                      block_auto_adjust_ff_dim=False, eos_token_id=None)


def changed(folder, line=None, code=""):
    source = inspect.getsource(modeling_lfm2)
    if line is not None:
        assert source.count(line) == 1
        source = source.replace(line, "".join(f"        {one}\n" for one in code.split("\n")) + line)
    return load_copy(source, "lfm2", folder).Lfm2ForCausalLM


def prompts(subject):
    check_prompts(subject, generated_by_stock(subject))


CHECKS = {
    "decode rows meet": [check_other_rows, check_batch, prompts],
    "a chunk forgets the state": [lambda subject: check_chunks(subject, []), prompts],
    "long prompts differ": [lambda subject: check_chunks(subject, [])],
    "the number of rows counts": [check_batch],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path):
    with Double():
        subject = subject_of(clone_of(changed(tmp_path, *FAULTS[fault]), small_config(), "sdpa"), "sdpa", 1000)
        for check in CHECKS[fault]:
            with pytest.raises(Refused, match="logits"):
                check(subject)
        if fault == "decode rows meet":
            assert any("mean" in text for text in token_operations(subject))


def test_checks_pass_without_a_fault(tmp_path):
    with Double():
        subject = subject_of(clone_of(changed(tmp_path), small_config(), "sdpa"), "sdpa", 1000)
        assert list(subject.states) == [(0, "conv", 0)]
        prompts(subject)
        check_chunks(subject, [])
        check_batch(subject)
        assert token_operations(subject) == []


def test_the_state_of_another_row_or_of_a_slot_before_is_never_read(tmp_path):
    with Double():
        subject = subject_of(clone_of(changed(tmp_path), small_config(), "sdpa"), "sdpa", 1000)
        steps = subject.steps()
        assert all(torch.isnan(tensor).all() for tensor in steps.tensors.values())
        assert check_other_rows(subject) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_only_the_class_itself_is_proved(fault, tmp_path):
    verdict = prove(changed(tmp_path, *FAULTS.get(fault, ())), small_config())
    assert (verdict.outcome == "proved") == (fault is None), verdict
