"""The likeliest tokens of rows, against float64, on whichever path a row's scores come about."""

from __future__ import annotations

import pytest
import torch
from edit_cases import DRAWN, Batch, Row, random_logits, random_rows
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from test_edits import drawn_settings, sequence_rows

from hf_paged.sampling.edits import sample_edited
from hf_paged.sampling.log_probs import (
    FILTERS,
    LOGPROBS,
    MOST_TOP,
    TOPS,
    shape_of,
    top_log_probs,
    top_name,
    top_processed,
    with_eos_barred,
)
from hf_paged.sampling.sampler import SamplingRows, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 40
ALL_STAGES = frozenset({FILTERS, "typical", "epsilon", "eta"})


def assert_best(found: torch.Tensor, expected: torch.Tensor) -> None:
    """``found`` [2, width] are the best of float64 log-probabilities ``expected`` [V], whichever of equal ones."""
    scores, ids = found.double().cpu()
    count = min(found.shape[1], len(expected))
    torch.testing.assert_close(scores[:count], expected.topk(count).values, rtol=1e-4, atol=1e-4)
    assert (scores[count:] == -torch.inf).all()
    known = ids[:count][scores[:count] > -torch.inf].long()
    assert len(set(known.tolist())) == len(known)
    torch.testing.assert_close(scores[: len(known)], expected[known], rtol=1e-4, atol=1e-4)


def test_names():
    assert [top_name("raw", count) for count in (0, 1, 8, 9, 32, 33, MOST_TOP)] == [
        "raw top 8", "raw top 8", "raw top 8", "raw top 32", "raw top 32", "raw top 128", "raw top 128"]
    assert all(TOPS[top_name(kind, 9)] == (kind, 32) for kind in LOGPROBS)
    assert (shape_of("raw", 3), shape_of("raw top 32", 3)) == ((3,), (3, 2, 32))
    assert sorted([*LOGPROBS, *TOPS])[0] == "processed"  # a kind comes before its likeliest tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [3, 40, 5000])
def test_the_best_of_plain_rows(device, dtype, vocab_size):
    logits = random_logits(1, 6, vocab_size + 2, dtype).to(device)[:, 1:-1]
    logits[1, 2], logits[2, :2] = -torch.inf, -torch.inf
    for width in (8, 32):
        found = top_log_probs(logits, torch.full((6, 2, width), torch.nan, device=device))
        for row, one in enumerate(logits.double().log_softmax(-1).cpu()):
            assert_best(found[row], one)


def test_rows_without_a_distribution():
    logits = random_logits(1, 4, VOCAB)
    logits[0, 3], logits[1, :] = torch.nan, -torch.inf
    found = top_log_probs(logits, torch.zeros(4, 2, 8))
    assert found[:2, 0].isnan().all() and found[2:, 0].isfinite().all()
    assert ((found[:, 1] >= 0) & (found[:, 1] < VOCAB)).all()


@given(st.lists(sequence_rows(drawn_settings), min_size=1, max_size=6), st.integers(0, 2**31), st.booleans())
@examples(max_examples=60)
def test_edited_and_filtered_rows_are_stocks(rows, seed, all_stages):
    """Also with stages that no row needs, and their filters beside plain rows."""
    rows = [*rows, Row([2], 1, DRAWN | {"temperature": 0.6}), Row([2], 1, {}), Row([2, 1], 1, {"min_length": 9})]
    logits, batch = random_logits(seed, len(rows), 30), Batch(rows)
    outs = {name: torch.zeros(shape_of(name, len(rows))) for name in ("processed top 8", "raw top 8")}
    features = batch.features | {FILTERS} | (ALL_STAGES if all_stages else frozenset())
    history = batch.history.clone()
    plain = batch.sample(logits)
    batch.history.copy_(history)
    tokens = sample_edited(logits, batch.sampling, batch.state, batch.slots, batch.position, batch.history, features,
                           None, outs)
    assert torch.equal(tokens, plain)
    assert not outs["raw top 8"].any()  # of another kind
    for number, row in enumerate(rows):
        assert_best(outs["processed top 8"][number], row.stock(logits[number]).double().log_softmax(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [{}, {"min_length": 50}, DRAWN, DRAWN | {"temperature": 0.5, "min_length": 50},
                                     DRAWN | {"top_k": 3}, DRAWN | {"top_p": 0.5, "temperature": 2.0},
                                     DRAWN | {"min_p": 0.2}])
def test_rows_without_edits(device, setting):
    """More rows than are sorted at a time; filters only where the stage says that some row has them."""
    rows = random_rows(3, 150, VOCAB, [setting])
    for row in rows:
        row.eos = (1, 1, 0)
    logits, batch = random_logits(5, 150, VOCAB), Batch(rows, device)
    settings = SamplingRows.of(batch.sampling, batch.slots, batch.position)
    out = torch.zeros(150, 2, 8, device=device)
    stages = frozenset({FILTERS}) if {"top_k", "top_p", "min_p"} & {k for k, v in setting.items() if v} else frozenset()
    top_processed(with_eos_barred(logits.to(device), settings), settings, stages, {"processed top 8": out})
    tokens = sample(logits.to(device), batch.sampling, batch.slots, batch.position, batch.history)
    for number, row in enumerate(rows):
        expected = row.stock(logits[number]).double().log_softmax(-1)
        assert_best(out[number], expected)
        assert expected[tokens[number]] > -torch.inf


def test_nothing_is_done_for_names_of_another_kind():
    rows = SamplingRows(*[None] * len(SamplingRows._fields))
    top_processed(torch.zeros(1, 3), rows, ALL_STAGES, {"raw top 8": torch.zeros(1, 2, 8)})


@pytest.mark.gpu
def test_a_graph_holds_it():
    """Nothing looks at a value from the host: new logits and settings come out of the same graph."""
    rows = random_rows(3, 20, 3000, [DRAWN | {"top_k": 30}, {}, DRAWN | {"top_p": 0.8}])
    batch, logits = Batch(rows, "cuda"), random_logits(1, 20, 3000, torch.bfloat16).cuda()
    out, raw = torch.zeros(20, 2, 32, device="cuda"), torch.zeros(20, 2, 32, device="cuda")

    def run():
        settings = SamplingRows.of(batch.sampling, batch.slots, batch.position)
        top_processed(with_eos_barred(logits, settings), settings, frozenset({FILTERS}), {"processed top 32": out})
        top_log_probs(logits, raw)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    logits.copy_(random_logits(7, 20, 3000))
    graph.replay()
    for number, row in enumerate(rows):
        assert_best(out[number], row.stock(logits[number].cpu()).double().log_softmax(-1))
        assert_best(raw[number], logits[number].double().log_softmax(-1).cpu())
