"""What tests on a GPU share: inputs there, and how near tokens and logits of a lower precision have to be."""

from __future__ import annotations

import torch
from support import assert_native_parity, batch, stock_copy, stock_generate

import hf_paged


def cuda(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def cuda_batch(lengths, seed=1):
    return cuda(batch(lengths, seed))


def assert_fp32_equals_stock(model, lengths, new_tokens, is_captured, **config):
    """Twice, the second time with prefix hits, by graphs if the steps can be captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    hf_paged.enable(model, strict=True, **config)
    inputs = cuda_batch(lengths)
    expected = stock_generate(model, **inputs, max_new_tokens=new_tokens)
    for _ in range(2):
        assert_native_parity(model, expected, **inputs, max_new_tokens=new_tokens)
    if is_captured:
        assert (hf_paged.get_engine(model).stats().num_graphs_captured > 0) is not config["enforce_eager"]


def gaps(logits, tokens):
    """By how many deviations the logits [T, V] of tokens [T] are below the best ones."""
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()


def assert_among_the_best(worse):
    """Rounding may turn a choice between two close tokens, but none of them is far below the best (see `gaps`)."""
    assert max(worse) < 0.5
    assert sum(gap > 0 for gap in worse) < len(worse) / 4


def assert_tokens_are_among_stocks_best(model, **config):
    stock, worse, lengths = stock_copy(model), [], [33, 70, 7]
    hf_paged.enable(model, strict=True, **config)
    for row, length in zip(model.generate(**cuda_batch(lengths), max_new_tokens=24), lengths, strict=True):
        tokens = row[70 - length :]
        worse += gaps(stock(tokens[None, :-1]).logits[0, length - 1 :].float(), tokens[length:])
    assert_among_the_best(worse)


@torch.no_grad()
def assert_logits_are_as_near_as_stocks(name, result, lengths, exact, stock, most):
    """To those of float32: ``result`` of a native call of rows of these lengths, ``most`` times stock's errors."""
    logits, errors, stocks = torch.stack(result.logits, 1).float(), [], []
    for row, (tokens, length) in enumerate(zip(result.sequences, lengths, strict=True)):
        ids = tokens[None, max(lengths) - length : -1]
        right, theirs = (one(ids).logits[0, length - 1 :].float() for one in (exact, stock))
        for found, into in ((logits[row], errors), (theirs, stocks)):
            into += ((found - right).abs().amax(-1) / right.std(-1)).tolist()
    print(f"{name}: {sum(errors):.2f} beside {sum(stocks):.2f} of stock")
    assert sum(errors) < most * sum(stocks)
