"""Log-probabilities of tokens under raw logits: kernel, reference and torch in float64 agree."""

import pytest
import torch

from hf_paged.sampling.log_probs import token_log_probs, token_log_probs_reference, token_log_probs_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
RUNS = [
    pytest.param(token_log_probs_reference, "cpu"),
    pytest.param(token_log_probs_triton, "cpu", marks=pytest.mark.interpreted),
    pytest.param(token_log_probs_triton, "cuda", marks=pytest.mark.gpu),
]


def case(rows, vocab_size, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, vocab_size + 24, generator=generator) * 6
    tokens = torch.randint(0, vocab_size, (rows,), generator=generator)
    return wide.to(dtype).to(device)[:, 8 : 8 + vocab_size], tokens.to(device)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device"), RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 257, 4096, 9001])
def test_it_is_log_softmax_in_float64(run, device, dtype, vocab_size):
    logits, tokens = case(5, vocab_size, dtype, device)
    out = torch.full((5,), 3.0, device=device)
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert run(logits, tokens, out) is out
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_rows_that_hold_what_is_no_number(run, device):
    logits, tokens = case(7, 5000, torch.float32, device)
    logits = logits.clone()
    logits[0, 4999] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    tokens[3] = -1
    logits[4, 100:] = -torch.inf  # whole tiles, and lanes that have nothing
    tokens[4] = 5
    logits[5, tokens[5]] = -torch.inf
    logits[6, :4999] = -torch.inf
    tokens[6] = 4999
    out = run(logits, tokens, torch.zeros(7, device=device)).cpu()
    expected = logits.double().log_softmax(-1).gather(1, tokens.clamp(min=0)[:, None])[:, 0].cpu()
    assert out[:4].isnan().all()
    torch.testing.assert_close(out[4:].double(), expected[4:], rtol=2e-6, atol=2e-6)
    assert out[5] == -torch.inf
    assert out[6] == 0.0


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_no_rows(run, device):
    assert run(*case(0, 9, torch.float32, device), torch.empty(0, device=device)).shape == (0,)


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c | {"logits": c["logits"][0]}, "logits must be"),
    (lambda c: c | {"logits": c["logits"].double()}, "logits must be"),
    (lambda c: c | {"logits": c["logits"].t().contiguous().t()}, "contiguous"),
    (lambda c: c | {"tokens": c["tokens"].int()}, "tokens: "),
    (lambda c: c | {"tokens": c["tokens"][:2]}, "tokens: "),
    (lambda c: c | {"out": c["out"].half()}, "out: "),
    (lambda c: c | {"out": torch.zeros(6)[::2]}, "out: "),
])
def test_arguments_that_are_refused(change, message):
    logits, tokens = case(3, 50, torch.float32, "cpu")
    with pytest.raises(ValueError, match=message):
        token_log_probs(**change({"logits": logits, "tokens": tokens, "out": torch.zeros(3)}))
