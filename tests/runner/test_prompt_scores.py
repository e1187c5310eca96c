"""Log-probabilities of prompt tokens: log_softmax in float32, a bounded number of logits at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_paged.runner import prompt_scores
from hf_paged.runner.prompt_scores import prompt_log_probs


def head(weight: torch.Tensor, sizes: list[int] | None = None) -> SimpleNamespace:
    """Stands for an executor: logits = hidden @ weight^T."""

    def logits(hidden: torch.Tensor, adapters: None) -> torch.Tensor:
        if sizes is not None:
            sizes.append(len(hidden))
        return hidden @ weight.T

    return SimpleNamespace(logits=logits, vocab_size=len(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 23])
def test_equals_log_softmax(monkeypatch, dtype, count):
    monkeypatch.setattr(prompt_scores, "_MOST_POSITIONS", 5)
    # Small whole numbers: their products round nowhere, whatever the shape that they are computed in.
    hidden, weight = torch.randint(-3, 4, (40, 8)).to(dtype), torch.randint(-3, 4, (100, 8)).to(dtype)
    before = hidden.clone()
    at, ids = torch.randint(0, 40, (count,)), torch.randint(0, 100, (count,))
    actual = prompt_log_probs(head(weight), hidden, at, ids)
    assert actual.dtype == torch.float32
    expected = (hidden @ weight.T)[at].float().log_softmax(-1)[torch.arange(count), ids]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(hidden, before)


def test_large_and_barred_logits():
    hidden = torch.eye(3)
    weight = torch.tensor([[1e4, -1e4, 0.0], [1e4 - 2.0, -1e4, -torch.inf], [-3e38, -1e4, 1.0]])
    weight = weight.nan_to_num(neginf=-3e38)
    actual = prompt_log_probs(head(weight), hidden, torch.arange(3), torch.tensor([1, 2, 0]))
    expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 0])]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("vocab_size", "most"), [(100, 1024), (151_936, 110), (1 << 25, 1)])
def test_no_more_logits_than_stated_exist_at_a_time(vocab_size, most):
    sizes: list[int] = []
    weight = torch.zeros(1, 1).expand(vocab_size, 1)
    count = 2 if vocab_size > 1 << 24 else most + 3
    prompt_log_probs(head(weight, sizes), torch.zeros(1, 1), torch.zeros(count, dtype=torch.int64),
                     torch.zeros(count, dtype=torch.int64))
    assert sizes == ([1, 1] if most == 1 else [most, 3])
