"""Conditions that a proof need not see both ways of: those whose every operand was read, or is fixed."""

from __future__ import annotations

import ast

import pytest

from hf_paged.models.proof.checks.conditions import is_harmless


@pytest.mark.parametrize(("condition", "harmless"), [
    ("n_rep == 1", True),
    ("not is_cross_attention and cache is not None", True),
    ("kwargs.get('use_cache', True) or self.config.scale", True),
    ("position_ids.ndim == 3 and position_ids.shape[0] == 4", True),
    ("layer_type == 'sliding_attention'", True),
    ("n_rep == 10", False),
    ("n_rep == 1 and hidden_states.max() > 3", False),
    ("is_cross_attention_like", False),
    ("theta < hidden_states.sum()", False),
    ("thetas", False),
    ("scale(theta)", False),
    ("seen or other_kwargs.get('seen')", False),
    ("my_kwargs.get(hidden_states.max())", False),
    ("layer_type == count_of(hidden_states)", False),
    ("position_ids.ndim == position_ids.max()", False),
    ("not (token_idx.numel() == 0 or token_idx.numel() == 7)", False),
])
def test_an_operand_that_contains_a_harmless_text_is_none(condition, harmless):
    assert is_harmless(ast.parse(condition, mode="eval").body) is harmless
