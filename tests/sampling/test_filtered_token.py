"""sample_tokens with top-k, top-p and min-p: the reference's survivors, found from candidates or over the whole row.

Tokens alone would miss a wrong survivor that is not drawn; the log-probability holds the survivors' mass.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import Rows, assert_as_reference, make_logits

from hf_paged.sampling import sample_tokens as module
from hf_paged.sampling.sampler import processed_scores

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
KERNEL = pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu),
])
INF = torch.inf


@pytest.fixture
def small(monkeypatch):
    """Every loop takes several turns on a vocabulary of a hundred; of more than 24 candidates the row is searched."""
    for name, value in {
        "GROUP_SIZE": 16, "_PIECE": 4, "_HELD": 24, "_HELD_TILE": 8, "_PIECE_TILE": 8, "_ROW_TILE": 16,
    }.items():
        monkeypatch.setattr(module, name, value)


def check(logits, rows):
    logprob = torch.zeros(len(logits), device=logits.device)
    tokens = rows.sample(logits, logprob=logprob)
    assert_as_reference(tokens, logits, rows, logprob)
    return tokens


ROW = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.5, 10.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 12, 50, 10_000]),
    "top_p": st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]),
    "min_p": st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.5, 1.0]),
    "eos": st.sampled_from([(), (0,), (2, 1)]),
    "min_length": st.sampled_from([0, 100_000]),
})
# Scores of a row: random ones, few distinct ones, all equal, mostly barred, one token, signed zeros, far apart.
KINDS = ["random", "flat", "tied", "equal", "barred", "one", "zeros", "far"]


def scores_of(kind, vocab_size, g):
    scores = torch.randn(vocab_size, generator=g)
    chosen = torch.randperm(vocab_size, generator=g)
    if kind == "random":
        scores = scores * 4
    elif kind == "tied":
        scores = torch.randint(-3, 3, (vocab_size,), generator=g).float()
    elif kind == "equal":
        scores = torch.full_like(scores, 1.5)
    elif kind == "barred":
        scores[chosen[: vocab_size * 9 // 10]] = -INF
    elif kind == "one":
        scores[chosen[1:]] = -INF
    elif kind == "zeros":
        scores = torch.tensor([0.0, -0.0, -1.0, -1e-3])[torch.randint(0, 4, (vocab_size,), generator=g)]
    elif kind == "far":
        scores = scores * 3000
    return scores


@KERNEL
@settings(max_examples=20)
@given(st.lists(st.tuples(ROW, st.sampled_from(KINDS)), min_size=1, max_size=4), st.integers(0, 2**31),
       st.sampled_from([3, 17, 100]), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_rows_of_every_kind_have_the_references_survivors(small, device, rows, seed, vocab_size, dtype):
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((len(rows), vocab_size + 5), torch.nan)
    for line, (_, kind) in zip(wide, rows, strict=True):
        line[:vocab_size] = scores_of(kind, vocab_size, g)
    check(wide.to(dtype).to(device)[:, :vocab_size], Rows([row for row, _ in rows], device, seed=seed))


@KERNEL
@pytest.mark.parametrize(("options", "dtype"), [
    ({"top_k": 3}, torch.float16), ({"top_k": 50}, torch.bfloat16), ({"top_p": 0.8}, torch.float16),
    ({"top_p": 0.999}, torch.bfloat16), ({"min_p": 0.1}, torch.float32),
    ({"top_k": 9, "top_p": 0.9, "min_p": 0.05}, torch.float32),
])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_from_candidates_and_over_the_row(small, monkeypatch, device, dtype, options, scale):
    """The same tokens with room for every candidate and for none."""
    logits = make_logits(5, 2, 100, dtype, device, scale)
    rows = Rows([options | {"temperature": temperature} for temperature in (0.7, 2.0)], device)
    tokens = []
    for held in (1, 128):
        monkeypatch.setattr(module, "_HELD", held)
        tokens.append(check(logits, rows))
    assert torch.equal(*tokens)


@KERNEL
@pytest.mark.parametrize("held", [8, 128])
def test_of_tokens_tied_at_the_threshold_of_top_p_the_last_stay(small, monkeypatch, device, held):
    """As a stable ascending sort has it: 2 above, 10 tied, of which four fifths less the rest are kept."""
    monkeypatch.setattr(module, "_HELD", held)
    draws = 40 if device == "cpu" else 2000
    scores = torch.full((60,), -50.0, device=device, dtype=torch.float16)
    tied = torch.arange(5, 55, 5, device=device)
    scores[tied], scores[7], scores[23] = 1.0, 1.0 + 2.0**-5, 1.0 + 2.0**-5
    rows = Rows([{"temperature": 1.0, "top_p": 0.6}] * draws, device)
    tokens = check(scores.expand(draws, -1), rows)
    assert tokens.unique().tolist() == sorted([7, 23, *tied[-6:].tolist()])


@KERNEL
def test_as_many_candidates_as_fit_and_one_more(small, device):
    """Counts around the room for candidates (24), all tied so that every one of them is a candidate."""
    logits = torch.full((4, 100), -20.0, device=device)
    for row, count in enumerate((23, 24, 25, 60)):
        logits[row, torch.randperm(100)[:count]] = 2.0
    check(logits, Rows([{"temperature": 1.0, "top_k": 4}] * 4, device))
    check(logits, Rows([{"temperature": 1.0, "top_p": 0.5}] * 4, device))


@KERNEL
def test_the_bound_of_top_p_spares_tied_tokens_at_the_threshold(small, device):
    """Nine of ten tokens alike, some of which stay: groups of them leave the bound no slack."""
    logits = torch.zeros(2, 100, device=device, dtype=torch.float16)
    logits[:, :10] = 0.6875
    check(logits, Rows([{"temperature": 1.0, "top_p": 0.2}, {"temperature": 1.0, "top_p": 0.3}], device))


@KERNEL
@pytest.mark.parametrize("top_k", [6, 7, 8, 27, 28, 29, 99, 100, 101])
def test_top_k_around_the_numbers_of_groups_pieces_and_tokens(small, device, top_k):
    logits = make_logits(top_k, 2, 100, torch.float16, device)
    check(logits, Rows([{"temperature": 0.9, "top_k": top_k}, {"temperature": 0.9, "top_k": top_k, "top_p": 0.7}],
                       device))


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_of_production(device, dtype):
    logits = make_logits(1, 6, 3000, dtype, device)
    check(logits, Rows([
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7},
        {"top_k": 3}, {"temperature": 1.2, "min_p": 0.05}, {"temperature": 1.0, "top_k": 2000, "top_p": 0.99},
    ], device))


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_either_zero_may_be_the_best_score(small, device, dtype):
    """Their integers differ; half of the tied tokens stay all the same."""
    logits = torch.full((2, 100), -0.0, device=device, dtype=dtype)
    logits[1, ::7] = 0.0
    check(logits, Rows([{"temperature": 1.0, "top_p": 0.5}] * 2, device))


@KERNEL
def test_greedy_rows_ignore_filters(small, device):
    logits = make_logits(1, 4, 100, torch.float16, device)
    rows = Rows([{"top_k": 3, "top_p": 0.1, "min_p": 1.0}] * 4, device)
    assert torch.equal(check(logits, rows), logits.argmax(-1))


@KERNEL
def test_a_filtered_row_does_not_see_its_batch(small, device):
    logits = make_logits(1, 4, 100, torch.float16, device)
    options = [{"temperature": 1.0, "top_k": 30}, {}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0}]
    numbers = {"seeds": torch.arange(4), "positions": torch.arange(4)}
    together = Rows(options, device, **numbers).sample(logits)
    for i in range(4):
        alone = Rows(options[i : i + 1], device, **{name: value[i : i + 1] for name, value in numbers.items()})
        assert alone.sample(logits[i : i + 1]) == together[i]


MIXTURE = [
    {}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.3, "top_k": 300},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}, {"temperature": 1.0, "top_k": 200_000},
    {"temperature": 2.0, "top_p": 0.999}, {"eos": (5, 9), "min_length": 10**6}, {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 40, "eos": (77,), "min_length": 10**6}, {"top_k": 5, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.5}, {"temperature": 0.01, "top_p": 0.9},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_gpu_one_graph_serves_every_mixture(dtype, scale):
    vocab_size, count = 151_936, len(MIXTURE)
    logits, rows = make_logits(0, count, vocab_size, dtype, "cuda", scale), Rows(MIXTURE, "cuda")
    logprob = torch.zeros(count, device="cuda")
    history = torch.zeros(count + 1, 40_000, dtype=torch.int32, device="cuda")
    rows.sample(logits, logprob=logprob, history=history)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = rows.sample(logits, logprob=logprob, history=history)
    for turn in range(4):
        fresh = Rows(MIXTURE[turn:] + MIXTURE[:turn], "cuda", seed=turn)
        logits.copy_(make_logits(turn, count, vocab_size, dtype, "cuda", scale))
        if turn == 3:
            logits.copy_(logits.round())  # ties everywhere
        for old, new in zip((*rows.table, rows.slots, rows.positions),
                            (*fresh.table, fresh.slots, fresh.positions), strict=True):
            old.copy_(new)
        graph.replay()
        assert_as_reference(tokens, logits, rows, logprob)
        assert torch.equal(history[rows.slots, rows.positions].long(), tokens)


@pytest.mark.gpu
def test_gpu_filtered_draws_follow_the_probabilities():
    """50 allowed tokens of 20,000, 30,000 draws."""
    draws = 30_000
    scores = make_logits(3, 1, 20_000, torch.bfloat16, "cuda")[0]
    rows = Rows([{"temperature": 1.0, "top_k": 50, "top_p": 0.9}] * draws, "cuda")
    tokens = rows.sample(scores.expand(draws, -1))
    first = rows.reference_rows().at(torch.zeros(1, dtype=torch.int64, device="cuda"))
    probabilities = processed_scores(scores[None].float(), first)[0].softmax(-1)
    counts = tokens.bincount(minlength=20_000)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * draws
    freedom = int((probabilities > 0).sum()) - 1
    statistic = float(((counts - expected) ** 2 / expected)[probabilities > 0].sum())
    # Wilson-Hilferty: the 1-in-10,000 point of chi-square.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
