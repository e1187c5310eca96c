"""Bit masks over logits: the reference against single bits, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.sampling.token_mask import TokenMasks, mask_tokens, mask_tokens_reference, mask_tokens_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(rows: int, width: int, num_words: int, num_masks: int, seed: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator).to(dtype)
    words = torch.randint(-(2**31), 2**31, (num_masks, num_words), generator=generator).to(torch.int32)
    lines = torch.randint(-1, num_masks, (rows,), generator=generator).to(torch.int32)
    return logits, TokenMasks(words, lines)


@settings(max_examples=30)
@given(rows=st.integers(0, 5), width=st.integers(1, 100), first=st.integers(0, 70), num_words=st.integers(1, 6),
       num_masks=st.integers(1, 3), seed=st.integers(0, 1000))
def test_the_reference_bar_by_bar(rows, width, first, num_words, num_masks, seed):
    logits, masks = drawn(rows, width, num_words, num_masks, seed)
    expected = logits.clone()
    for row, line in enumerate(masks.lines.tolist()):
        for column in range(width if line >= 0 else 0):
            token = first + column
            inside = token // 32 < num_words
            if not inside or not int(masks.words[line, token // 32]) >> (token % 32) & 1:
                expected[row, column] = -torch.inf
    assert mask_tokens_reference(logits, masks, first) is logits
    assert torch.equal(logits, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "first", "num_words"), [
    (3, 96, 0, 3), (4, 5000, 0, 157), (2, 70, 33, 3), (2, 100, 31, 2), (1, 1, 0, 1), (0, 40, 0, 2),
])
def test_the_kernel_against_the_reference(dtype, rows, width, first, num_words):
    logits, masks = drawn(rows, width, num_words, 2, seed=rows + width, dtype=dtype)
    strided = torch.randn(rows, width + 7).to(dtype)
    strided[:, :width] = logits
    expected = mask_tokens_reference(logits.clone(), masks, first)
    assert torch.equal(mask_tokens_triton(logits, masks, first), expected)
    beyond = strided[:, width:].clone()
    assert torch.equal(mask_tokens_triton(strided[:, :width], masks, first), expected)
    assert torch.equal(strided[:, width:], beyond)


def test_masks_of_a_part_of_the_rows():
    masks = TokenMasks(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, -1, 0], dtype=torch.int32))
    assert masks.of(slice(2, 4), padding=1).lines.tolist() == [0, -1]
    assert masks.of(slice(0, 2)).lines.tolist() == [0, -1]


@pytest.mark.parametrize(("change", "text"), [
    (lambda logits, masks: (logits.long(), masks), "logits must be"),
    (lambda logits, masks: (logits.t(), masks), "logits must be"),
    (lambda logits, masks: (logits, masks._replace(words=masks.words.long())), "words must be"),
    (lambda logits, masks: (logits, masks._replace(lines=masks.lines[:-1])), "lines must be"),
    (lambda logits, masks: (logits, masks._replace(lines=masks.lines.long())), "lines must be"),
])
def test_what_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        mask_tokens(*change(*drawn(4, 40, 2, 2, seed=0)))
