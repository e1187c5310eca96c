"""The best of the ranks' best tokens is the token that the sampler takes from whole rows."""

import pytest
import torch
from sampling_cases import Rows, make_logits, plain_rows

from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import sample_reference
from hf_paged.sampling.shard_best import (
    INVALID,
    NO_TOKEN,
    Columns,
    best_of_shard,
    best_of_shard_reference,
    best_of_shard_triton,
    keys_of,
    settle_tokens_reference,
    settle_tokens_triton,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
REFERENCE = pytest.param(best_of_shard_reference, settle_tokens_reference, "cpu")
RUNS = [
    REFERENCE,
    pytest.param(best_of_shard_triton, settle_tokens_triton, "cpu", marks=pytest.mark.interpreted),
    pytest.param(best_of_shard_triton, settle_tokens_triton, "cuda", marks=pytest.mark.gpu),
]


def agreed(run, settle, logits, settings, width):
    """Tokens of ranks with `width` columns each, the last one's padded with columns that nobody may look at."""
    vocab_size, keys = logits.shape[1], []
    for first in range(0, vocab_size + width, width):  # the last rank has no token at all
        held = torch.full((len(logits), width), 1000.0, dtype=logits.dtype, device=logits.device)
        here = logits[:, first : first + width]
        held[:, : here.shape[1]] = here
        shard = Columns(min(first, vocab_size // 1024 * 1024 + 1024), min(first + width, vocab_size))
        keys.append(
            best_of_shard(held, shard, settings.table, settings.slots, settings.positions)
            if shard.end <= shard.first
            else run(held, shard, settings.table, settings.slots, settings.positions)
        )
    history = torch.full((len(settings.table.floats), 40_001), -7, dtype=torch.int32, device=logits.device)
    tokens = settle(torch.stack(keys).amax(0), settings.slots, settings.positions, history)
    assert torch.equal(history[settings.slots, settings.positions], tokens.clamp(min=0).int())
    assert int((history != -7).sum()) == len(tokens)
    return tokens


def whole(logits, settings):
    if logits.is_cuda:
        return sample_tokens(logits, settings.table, settings.slots, settings.positions)
    return sample_reference(logits, settings.reference_rows())


@pytest.mark.slow
@pytest.mark.parametrize(("run", "settle", "device"), RUNS)
@pytest.mark.parametrize(("dtype", "width"), zip(FLOATS, (1024, 2048, 3072), strict=True))
def test_ranks_agree_on_the_token_of_the_whole_row(run, settle, device, dtype, width):
    logits = make_logits(3, 24, 5000, dtype, device)
    temperatures = [0.0 if row % 3 == 0 else 0.3 + 0.1 * row for row in range(24)]
    settings = plain_rows(temperatures, device)
    tokens = agreed(run, settle, logits, settings, width)
    assert torch.equal(tokens, whole(logits, settings))
    assert len({int(token) // 1024 for token in tokens}) > 3  # the winners are spread over the ranks


@pytest.mark.parametrize(("run", "settle", "device"), RUNS)
def test_of_equal_scores_the_lowest_token_wins_on_whatever_rank(run, settle, device):
    logits = torch.randint(-3, 3, (8, 5000), generator=torch.Generator().manual_seed(1)).float()
    logits[1], logits[2] = 2.0, -torch.inf
    logits[3, [4999, 77 + 1024, 2100]] = torch.inf
    logits[4] = torch.tensor([-0.0, 0.0]).repeat(2500)
    logits[5, :4998], logits[5, 4998:] = -torch.inf, -5.0
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    tokens = agreed(run, settle, logits.to(device), plain_rows([0.0] * 8, device), 1024)
    assert tokens.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("run", "settle", "device"), RUNS)
@pytest.mark.parametrize("column", [5, 4999])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_invalid_on_one_rank_is_invalid(run, settle, device, column, temperature):
    """NaN always; +inf, or nothing above -inf, where a token is drawn. Other rows are left alone."""
    logits = make_logits(2, 5, 5000, torch.float32, device)
    logits[1, column], logits[2, column], logits[3] = torch.nan, torch.inf, -torch.inf
    tokens = agreed(run, settle, logits, settings := plain_rows([temperature] * 5, device), 1024)
    assert tokens.tolist() == whole(logits, settings).tolist()
    assert tokens.tolist()[1] == -1 and tokens.tolist()[2] == (-1 if temperature else column)
    logits[4] = -torch.inf
    logits[4, column] = 1.0  # the only token there is, on one rank
    assert agreed(run, settle, logits, settings, 1024).tolist()[4] == column


@pytest.mark.parametrize(("run", "settle", "device"), RUNS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_eos_is_barred_by_its_id_not_by_its_column(run, settle, device, temperature):
    eos = (3, 4100)
    settings = Rows([{"temperature": temperature, "eos": eos, "min_length": length} for length in (0, 50_000)], device,
                    positions=torch.tensor([5, 5]))
    logits = make_logits(4, 2, 5000, torch.float32, device)
    logits[:, 4100], logits[:, 3], logits[:, 3 + 1024] = 90.0, 80.0, 70.0
    assert agreed(run, settle, logits, settings, 1024).tolist() == [4100, 1027]


def test_nan_at_a_barred_eos_bars_nothing_else():
    """As behind stock's processor, which overwrites it; in one rank's sampler, too."""
    logits = torch.zeros(1, 5000)
    logits[0, 4100], logits[0, 7] = torch.nan, 1.0
    settings = Rows([{"temperature": 0.0, "eos": (4100,), "min_length": 50_000}], "cpu", positions=torch.tensor([5]))
    assert agreed(*REFERENCE.values[:2], logits, settings, 1024).tolist() == [7] == whole(logits, settings).tolist()


def test_keys_of_tokens_that_one_rank_decides():
    keys = keys_of(torch.tensor([7, -1, 0]))
    assert keys[1] == INVALID and (keys > NO_TOKEN).all()
    history = torch.zeros(1, 4, dtype=torch.int32)
    tokens = settle_tokens_reference(keys, torch.zeros(3, dtype=torch.int64), torch.arange(3), history)
    assert tokens.tolist() == [7, -1, 0] and history.tolist() == [[7, 0, 0, 0]]


def test_a_shard_that_starts_inside_a_group_is_refused():
    settings = plain_rows([0.0], "cpu")
    with pytest.raises(ValueError, match=r"columns.first=100: expected a multiple of 1024"):
        best_of_shard(torch.zeros(1, 64), Columns(100, 164), settings.table, settings.slots, settings.positions)
