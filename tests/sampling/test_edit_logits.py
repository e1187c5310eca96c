"""The edit kernels give the reference's scores to the bit; on CUDA, one graph serves changed slots and settings."""

import pytest
import torch
from edit_cases import DRAWN, Batch, Row, random_logits, random_rows

from hf_paged.sampling import edit_logits as module
from hf_paged.sampling.edit_lines import stock_decays_finite_only
from hf_paged.sampling.edit_logits import edit_logits
from hf_paged.sampling.edit_reference import edited_scores
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import SamplingRows, sample, sample_reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
MANY = [[[a, b], 0.1 * a - b] for a in range(10) for b in range(10)] + [[[t], 0.5] for t in range(3, 30)]
STAGES = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.3, "presence_penalty": -1.9},
    {"frequency_penalty": -0.4, "repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"sequence_bias": [*MANY, [[0, 0, 0, 0], 3.3], [[1, 0], -0.7]]},
    {"sequence_bias": [[[2, 3], -torch.inf]], "repetition_penalty": 0.6},
    {"bad_words_ids": [[7], [2, 3], [0, 0], [1, 1, 1], *([3, t] for t in range(30))]},
    {"min_length": 12},
    {"forced_bos_token_id": 4, "begin_suppress_tokens": [4, 5]},
    {"forced_eos_token_id": [6, 2], "remove_invalid_values": True},
    {"remove_invalid_values": True, "min_new_tokens": 9, "bad_words_ids": [[5]]},
    {"exponential_decay_length_penalty": (1, 1.07)},
    {"exponential_decay_length_penalty": (0, 1.2), "min_length": 60, "suppress_tokens": [1]},
    {"suppress_tokens": list(range(0, 30, 2)) + [10_000]},
]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several turns of every loop, and several programs, for short rows."""
    for name in ("_TILE", "_RULE_TILE", "_ROW_TILE"):
        monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(module, "_PROGRAMS", 2)


def cases(seed, count, vocab_size, settings, device, longest=90):
    """Rows near the ends of their sequences among others, and logits with invalid ones, in a wider tensor."""
    rows = random_rows(seed, count, vocab_size, settings, longest)
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row.max_length = len(row.tokens) + 1
        if number % 4 == 0:
            row.prompt_length = len(row.tokens)
        if number % 7 == 0:
            row.tokens, row.prompt_length = row.tokens[:1], 1
        row.eos = (1, 5)[: 1 + number % 2]
    wide = random_logits(seed, count, vocab_size + 3)
    g = torch.Generator().manual_seed(seed)
    for value in (torch.nan, torch.inf, -torch.inf):
        wide[torch.randint(count, (3,), generator=g), torch.randint(8, (3,), generator=g)] = value
    return Batch(rows, device, seed, capacity=128), wide


def run(logits, batch):
    return edit_logits(logits, *batch.arguments, decays_finite_only=stock_decays_finite_only())


def assert_equal(actual, expected):
    assert actual.dtype is torch.float32
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))
    assert torch.equal(actual.isinf(), expected.isinf())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(len(STAGES)))
def test_a_stage_alone_is_the_references(device, small_tiles, number):
    batch, wide = cases(number, 12, 40, [STAGES[number]], device)
    logits = wide.to(device)[:, 2:-1]
    before = logits.clone()
    scores = run(logits, batch)
    assert_equal(scores, edited_scores(logits, *batch.arguments))
    assert_equal(logits, before)
    assert number == 0 or not torch.equal(scores.nan_to_num(), logits.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("together", [False, True])
def test_rows_of_all_settings_side_by_side(device, small_tiles, dtype, together):
    settings = STAGES
    if together:  # pairs of stages in one row
        settings = [a | b for a, b in zip(STAGES, STAGES[1:] + STAGES[:1], strict=True)]
    batch, wide = cases(3, 28, 50, settings, device)
    logits = wide.to(device, dtype)[:, 2:-1]
    assert_equal(run(logits, batch), edited_scores(logits, *batch.arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_as_they_are_and_a_long_history(device):
    settings = [STAGES[1] | STAGES[3] | STAGES[6], STAGES[7], STAGES[12] | {"suppress_tokens": list(range(3, 5000, 3))}]
    batch, wide = cases(5, 3, 5001, settings, device)
    tokens = torch.randint(0, 60, (3, 2600), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tokens[0, 2000] = 5003  # the embedding may have more rows than the head
    history = torch.zeros(len(batch.history), 3000, dtype=torch.int32)
    history[batch.slots.cpu(), :2600] = tokens
    batch.history, batch.position = history.to(device), torch.tensor([2600, 2599, 513], device=device).int()
    logits = wide.to(device)[:, 2:-1]
    scores = run(logits, batch)
    assert_equal(scores, edited_scores(logits, *batch.arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_a_biased_sum_is_added_once_and_in_stocks_order(device):
    """Numbers whose sum depends on the order; a target with several rules."""
    biases = [[[2, 3], 1e8], [[2, 2, 3], -1e8], [[1, 2, 3], 7.0], [[3], 0.3], [[5, 2, 2, 3], 0.001]]
    row = Row([5, 2, 2], 1, {"sequence_bias": biases})
    batch, logits = Batch([row], device), random_logits(1, 1, 30)
    assert torch.equal(run(logits.to(device), batch)[0].cpu(), row.stock(logits[0]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_sampler_takes_a_table_without_eos(device):
    """How the edits hand it the scores, in which EOS is barred already."""
    batch = Batch([Row([3], 1, s | {"min_length": 9}) for s in ({}, DRAWN, DRAWN | {"top_k": 3})], device)
    table = batch.sampling._replace(eos=batch.sampling.eos[:, :0])
    scores = random_logits(2, 3, 30).to(device)
    scores[0, 1] = 99.0
    tokens = sample_tokens(scores, table, batch.slots, batch.position)
    assert torch.equal(tokens, sample_reference(scores, SamplingRows.of(table, batch.slots, batch.position)))
    assert tokens[0] == 1


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    batch = Batch([Row([1], 1, {"repetition_penalty": 2.0})], device)
    args = list(batch.arguments)
    args[2], args[3] = args[2][:0], args[3][:0]
    assert edit_logits(torch.zeros(0, 9, device=device), *args, decays_finite_only=True).shape == (0, 9)


@pytest.mark.parametrize("wrong", [
    {"logits": torch.zeros(2, 9, dtype=torch.float64)}, {"logits": torch.zeros(9, 2).T}, {"logits": torch.zeros(9)},
    {"slots": torch.zeros(2, dtype=torch.int32)}, {"slots": torch.zeros(3, dtype=torch.int64)},
    {"position": torch.zeros(2)}, {"history": torch.zeros(5, 9, dtype=torch.int64)},
])
def test_other_shapes_and_dtypes_are_refused(wrong):
    arguments = {
        "logits": torch.zeros(2, 9), "slots": torch.zeros(2, dtype=torch.int64),
        "position": torch.zeros(2, dtype=torch.int64), "history": torch.zeros(5, 9, dtype=torch.int32),
    } | wrong
    batch = Batch([Row([1], 1)])
    with pytest.raises(ValueError, match=next(iter(wrong))):
        edit_logits(**arguments, sampling=batch.sampling, table=batch.state.table, features=frozenset(),
                    decays_finite_only=True)


# -- on a GPU ------------------------------------------

SETTINGS = [s | drawn for s, drawn in zip(STAGES, [{}, DRAWN, DRAWN | {"top_k": 5}] * 9, strict=False)]
WARPED = [DRAWN | {"typical_p": 0.8, "temperature": 0.7}, DRAWN | {"epsilon_cutoff": 0.01, "top_p": 0.9},
          DRAWN | {"eta_cutoff": 0.02, "top_k": 9, "min_p": 0.01}, {"renormalize_logits": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS + WARPED])
@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_tokens_are_the_cpus(settings, vocab_size):
    """But for draws whose perturbed scores lie within rounding: none with these seeds."""
    cpu, wide = cases(7, 72, vocab_size, settings, "cpu")
    cuda, _ = cases(7, 72, vocab_size, settings, "cuda")
    logits, logprobs = wide[:, 2:-1], [torch.zeros(72), torch.zeros(72, device="cuda")]
    expected = cpu.sample(logits, logprob=logprobs[0])
    tokens = cuda.sample(logits.cuda(), logprob=logprobs[1])
    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(cuda.history.cpu(), cpu.history)
    drawn = torch.tensor([row.settings.get("do_sample", False) for row in cpu.rows])
    torch.testing.assert_close(logprobs[1].cpu()[drawn], logprobs[0][drawn], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
def test_neutral_rows_beside_edited_ones_get_the_plain_samplers_tokens():
    plain = [{}, DRAWN, DRAWN | {"top_k": 7}, DRAWN | {"top_p": 0.9}, {"min_length": 99}]
    batch, wide = cases(11, 100, 5000, [one for pair in zip(plain * 5, SETTINGS, strict=False) for one in pair], "cuda")
    logits = wide.cuda().bfloat16()[:, 2:-1]
    expected = sample(logits, batch.sampling, batch.slots, batch.position, batch.history.clone())
    neutral = torch.tensor([not row.edits.features() for row in batch.rows])
    assert torch.equal(batch.sample(logits).cpu()[neutral], expected.cpu()[neutral])


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS + WARPED])
def test_a_graph_serves_changed_slots_logits_and_settings(settings):
    batch, wide = cases(13, 36, 3000, settings, "cuda")
    logits = wide.cuda().bfloat16()[:, 2:-1]
    features = batch.features
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        batch.sample(logits)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            tokens = batch.sample(logits)
    torch.cuda.synchronize()
    generation = batch.state.generation
    for shift in (1, 5, 11):
        batch.rows = batch.rows[shift:] + batch.rows[:shift]
        batch.put()
        batch.slots.copy_(batch.slots.roll(shift))
        batch.position.copy_(torch.tensor([len(row.tokens) for row in batch.rows]))
        batch.put()
        logits.copy_(logits.roll(shift, 1))
        history = batch.history.clone()
        graph.replay()
        replayed, replayed_history = tokens.clone(), batch.history.clone()
        batch.history.copy_(history)
        assert batch.features == features
        assert torch.equal(replayed, batch.sample(logits))
        assert torch.equal(replayed_history, batch.history)
    assert batch.state.generation == generation
