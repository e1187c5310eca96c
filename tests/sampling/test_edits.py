"""Edits of logits: transformers' own processors, row by row, to the bit; draws as the sampler's and stock's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from edit_cases import DRAWN, Batch, Row, random_logits, random_rows, row_of
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from hf_paged.sampling import edit_lines
from hf_paged.sampling.edit_lines import SharedLines, encode_tokens
from hf_paged.sampling.edit_reference import Edits, cut_off, edited_scores, warped_scores
from hf_paged.sampling.edits import EditState, sample_edited
from hf_paged.sampling.sampler import processed_scores, sample

VOCAB = 30
BIASES = [[[5], 2.5], [[2, 5], -1.3], [[1, 2, 5], 0.7], [[3], -torch.inf], [[2, 2], 9.1], [[0, 0, 0], 0.3]]
STAGES = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "repetition reward": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.3},
    "presence reward": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "frequency against presence": {"frequency_penalty": 0.3, "presence_penalty": -0.9},
    "every penalty": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.4,
                      "sequence_bias": [[[2], 4.0], [[3], -1.0]]},
    "no token twice": {"no_repeat_ngram_size": 1},
    "no bigram twice": {"no_repeat_ngram_size": 2},
    "no n-gram twice": {"no_repeat_ngram_size": 3},
    "sequence bias": {"sequence_bias": BIASES},
    "bad words": {"bad_words_ids": [[1], [7], [2, 3], [1, 1], [0, 1, 2]]},
    "min length": {"min_length": 12},
    "min new tokens": {"min_new_tokens": 6},
    "forced bos": {"forced_bos_token_id": 4},
    "forced eos": {"forced_eos_token_id": 6},
    "several forced eos": {"forced_eos_token_id": [6, 2]},
    "remove invalid": {"remove_invalid_values": True, "bad_words_ids": [[7]]},
    "decay": {"exponential_decay_length_penalty": (2, 1.07)},
    "decay downwards": {"exponential_decay_length_penalty": (0, 0.9)},
    "decay of a barred eos": {"exponential_decay_length_penalty": (0, 1.1), "min_length": 20},
    "suppress": {"suppress_tokens": [1, 4, 29, 31, -1]},
    "begin suppress": {"begin_suppress_tokens": [2, 9]},
    "begin suppress after bos": {"forced_bos_token_id": 4, "begin_suppress_tokens": [2, 9]},
    "renormalize": {"renormalize_logits": True, "suppress_tokens": [3]},
}
LATE = {
    "typical": {"typical_p": 0.6}, "typical, little": {"typical_p": 0.05}, "typical, most": {"typical_p": 0.99},
    "epsilon": {"epsilon_cutoff": 0.02}, "epsilon, most": {"epsilon_cutoff": 0.9},
    "eta": {"eta_cutoff": 0.05}, "eta, little": {"eta_cutoff": 3e-4},
}


def edited(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return edited_scores(logits, *batch.arguments)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())


def assert_as_stock(logits: torch.Tensor, rows: list[Row]) -> None:
    """Edited scores of greedy rows are stock's to the bit, and so are their tokens."""
    batch = Batch(rows)
    scores, tokens = edited(logits, batch), batch.sample(logits)
    for number, row in enumerate(rows):
        final = row.stock(logits[number])
        before = dataclasses.replace(row, settings=row.settings | {"renormalize_logits": False})
        assert same(scores[number], before.stock(logits[number])), row
        assert tokens[number] == (-1 if final.isnan().any() else final.argmax()), row


# -- stages ------------------------------------------


def test_every_setting_has_a_case_here():
    """A setting without one would not be compared with the processor that stock makes for it."""
    every = {field.name: field.default for field in dataclasses.fields(Edits)}
    found = [Row([1], 1, DRAWN | settings).edits for settings in (STAGES | LATE).values()]
    tested = {name for name, neutral in every.items() if any(getattr(edits, name) != neutral for edits in found)}
    assert set(every) - tested == {"also_seen"}  # no option of a config: a test of its own below


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_alone_does_what_the_processor_does(name, dtype):
    rows = random_rows(3, 40, VOCAB, [STAGES[name]])
    for number, row in enumerate(rows[:20]):  # the ends of a sequence, where stages begin and end
        row.max_length = len(row.tokens) + number % 3
        row.prompt_length = max(1, len(row.tokens) - number % 2)
        row.tokens = row.tokens[:1] if number % 5 == 0 else row.tokens
        row.prompt_length = min(row.prompt_length, len(row.tokens))
    for row in rows[20:26]:
        row.tokens, row.prompt_length = (row.tokens * 2)[:2], 1
    logits = random_logits(1, 40, VOCAB, dtype)
    before = logits.clone()
    assert_as_stock(logits, rows)
    assert torch.equal(logits, before)
    changed = [not torch.equal(row.stock(one), one.float()) for row, one in zip(rows, logits, strict=True)]
    assert any(changed)


bad_values = st.sampled_from([torch.nan, torch.inf, -torch.inf, 3.0])
token = st.integers(0, VOCAB - 1)
few = st.integers(0, 5)
sequences = st.lists(few, min_size=1, max_size=4)
early_settings = st.fixed_dictionaries({}, optional={
    "repetition_penalty": st.sampled_from([0.5, 1.1, 1.3, 5.0]),
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "no_repeat_ngram_size": st.integers(1, 6),
    "sequence_bias": st.lists(st.tuples(sequences, st.floats(-9, 9, width=32)).map(list), min_size=1, max_size=12),
    "bad_words_ids": st.lists(sequences, min_size=1, max_size=4).filter(lambda words: any(w != [1] for w in words)),
    "min_length": st.integers(1, 24),
    "min_new_tokens": st.integers(1, 9),
    "forced_bos_token_id": token,
    "forced_eos_token_id": st.one_of(token, st.lists(token, min_size=1, max_size=3)),
    "remove_invalid_values": st.just(True),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 8), st.sampled_from([0.9, 1.0, 1.01, 1.5])),
    "suppress_tokens": st.lists(token, min_size=1, max_size=6),
    "begin_suppress_tokens": st.lists(token, min_size=1, max_size=3),
    "renormalize_logits": st.just(True),
})


@st.composite
def sequence_rows(draw, settings):
    tokens = draw(st.lists(few, min_size=1, max_size=20))
    return Row(
        tokens, draw(st.integers(1, len(tokens))), draw(settings), draw(st.sampled_from([(1,), (1, 4), (4, 1, 1)])),
        draw(st.sampled_from([1000, len(tokens) + 1, len(tokens) + 2])), draw(st.integers(0, 2**62)),
    )


@given(st.lists(sequence_rows(early_settings), min_size=1, max_size=6), st.integers(0, 2**31),
       st.lists(st.tuples(few, token, bad_values), max_size=4))
@examples(max_examples=100)
def test_any_settings_of_rows_side_by_side_are_stocks_row_by_row(rows, seed, invalid):
    logits = random_logits(seed, len(rows), VOCAB)
    for row, column, value in invalid:
        logits[row % len(rows), column] = value
    assert_as_stock(logits, rows)


def test_tokens_seen_elsewhere_are_penalised_once():
    """As stock does with the padding before a shorter row, in releases that penalise it."""
    rows = [Row([4, 5, 4], 2), Row([4], 1)]
    batch = Batch(rows)
    logits = random_logits(4, 2, VOCAB)
    edits = [Edits(repetition_penalty=1.5, also_seen=(9, 4, 99)), Edits(repetition_penalty=2.0)]
    lines = [row_of(each, length, 10, (1,)) for each, length in zip(edits, (2, 1), strict=True)]
    batch.state.put(batch.slots.numpy(), lines)
    scores = edited_scores(logits, *batch.arguments[:-1], edits[0].features())
    for number, (padded, penalty) in enumerate([([9, 4, 5, 4], 1.5), ([4], 2.0)]):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([padded]), logits[number][None])
        assert torch.equal(scores[number], expected[0])


@pytest.mark.parametrize("whole_context", [False, True])
def test_biased_sequences_by_release(monkeypatch, whole_context):
    """Older releases leave a sequence alone whose beginning is the whole context, and add up in another order."""
    monkeypatch.setattr(edit_lines, "stock_matches_whole_context", lambda: whole_context)
    biases = [[[2, 3], 1.0], [[2, 2, 3], 0.1], [[5, 3], 4.0], [[3], 0.3]]
    batch = Batch([Row([2], 1, {"sequence_bias": biases}), Row([2, 2], 1, {"sequence_bias": biases})])
    scores = edited(torch.zeros(2, VOCAB), batch)
    single, one, two = (torch.tensor(x) for x in (0.3, 1.0, 0.1))
    assert scores[0, 3] == (single + one if whole_context else single)
    assert scores[1, 3] == (single + one + two if whole_context else single + one)
    assert scores.count_nonzero() == 2


def test_renormalizing_rounds_the_best_scores_to_a_tie():
    """The greedy choice is made after it, as in stock."""
    logits = torch.zeros(2, 3000)
    logits[:, 3], logits[:, 7] = 1.0, 1.0 + 2.0**-23
    rows = [Row([2], 1, {"renormalize_logits": True}), Row([2], 1)]
    assert_as_stock(logits, rows)
    assert Batch(rows).sample(logits).tolist() == [3, 7]


def test_of_a_sequence_biased_twice_the_last_counts():
    row = Row([2, 2], 1, {"sequence_bias": [[[2, 3], 1.0], [[4], 3.0], [[2, 3], 5.0]]})
    assert_as_stock(random_logits(0, 1, VOCAB), [row])


def test_a_later_stage_may_lift_the_bar_on_eos():
    """Minimum lengths act at their place in the order, not at the end."""
    bars = {"min_length": 1000, "bad_words_ids": [[i] for i in range(1, VOCAB)], "remove_invalid_values": True}
    forced = {"forced_eos_token_id": 0, "min_length": 1000}
    rows = [Row([3], 1, bars, eos=(0,)), Row([3, 4], 1, forced, eos=(0,), max_length=3)]
    logits = random_logits(21, 2, VOCAB)
    assert_as_stock(logits, rows)
    assert Batch(rows).sample(logits).tolist() == [0, 0]


def test_tokens_outside_the_vocabulary_are_left_alone():
    """Embeddings may have more rows than the head."""
    settings = [{"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "suppress_tokens": [VOCAB + 4]}]
    logits = random_logits(2, 1, VOCAB)
    scores = edited(logits, Batch([Row([VOCAB, VOCAB + 3], 1, settings[0])]))
    assert torch.equal(scores, logits)


def test_stages_that_are_not_named_are_not_run():
    batch = Batch(random_rows(1, 6, VOCAB, list(STAGES.values())))
    logits = random_logits(2, 6, VOCAB)
    scores = edited_scores(logits, *batch.arguments[:-1], frozenset())
    expected = [dataclasses.replace(row, settings={k: v for k, v in row.settings.items() if k.startswith("min_")})
                for row in batch.rows]
    assert torch.equal(scores, torch.stack([row.stock(one) for row, one in zip(expected, logits, strict=True)]))


# -- sampling ------------------------------------------


drawn_settings = st.fixed_dictionaries(
    {"do_sample": st.just(True), "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.6]),
     "top_k": st.sampled_from([0, 1, 3, 12, 500])},
    optional={
        "top_p": st.sampled_from([0.1, 0.6, 0.95]), "min_p": st.sampled_from([0.001, 0.1, 0.8]),
        "typical_p": st.sampled_from([0.05, 0.4, 0.9, 1.0]), "epsilon_cutoff": st.sampled_from([0.0, 1e-3, 0.05, 0.6]),
        "eta_cutoff": st.sampled_from([0.0, 3e-4, 0.03, 0.5]), "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.4]), "frequency_penalty": st.sampled_from([-0.3, 2.0]),
        "suppress_tokens": st.just([2, 3, 4]), "renormalize_logits": st.just(True),
        "sequence_bias": st.just(BIASES), "min_new_tokens": st.just(5),
    },
)


@given(st.lists(sequence_rows(drawn_settings), min_size=1, max_size=6), st.integers(0, 2**31))
@examples(max_examples=100)
def test_rows_are_drawn_from_stocks_probabilities(rows, seed):
    logits, batch = random_logits(seed, len(rows), VOCAB), Batch(rows)
    sampling, table = batch.sampling_rows(), batch.state.table
    settings = (table.typical_p, table.epsilon_cutoff, table.eta_cutoff)
    kept = cut_off(warped_scores(edited(logits, batch), sampling), *(column[batch.slots] for column in settings))
    logprob = torch.zeros(len(rows))
    tokens = batch.sample(logits, logprob=logprob)
    for number, row in enumerate(rows):
        expected = row.stock(logits[number])
        assert torch.equal(kept[number].isinf(), expected.isinf()), row
        torch.testing.assert_close(kept[number].softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-8)
        known = expected.log_softmax(-1)[tokens[number]]
        assert known > -torch.inf, row
        torch.testing.assert_close(logprob[number], known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LATE)
def test_a_filter_alone_keeps_what_the_warper_keeps(name):
    rows = random_rows(5, 30, 200, [DRAWN | LATE[name]])
    logits, batch = random_logits(6, 30, 200), Batch(rows)
    table = batch.state.table
    settings = (table.typical_p, table.epsilon_cutoff, table.eta_cutoff)
    kept = cut_off(logits, *(column[batch.slots] for column in settings))
    assert torch.equal(kept, torch.stack([row.stock(one) for row, one in zip(rows, logits, strict=True)]))
    assert kept.isinf().any()


@pytest.mark.parametrize("setting", [
    {"typical_p": 0.8}, {"epsilon_cutoff": 0.04}, {"eta_cutoff": 0.2, "temperature": 1.5},
    {"repetition_penalty": 1.8, "suppress_tokens": [7]}, {"repetition_penalty": 1.8, "typical_p": 0.9, "top_k": 8},
])
def test_sampled_tokens_follow_the_probabilities(setting):
    draws, scores = 4_000, torch.linspace(-1.5, 1.5, 12).roll(5)
    batch = Batch([Row([3, 8], 1, DRAWN | setting, seed=number) for number in range(draws)], capacity=8)
    probabilities = batch.rows[0].stock(scores).softmax(-1)
    counts = batch.sample(scores.expand(draws, -1)).bincount(minlength=12)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * draws
    assert ((counts - expected) ** 2 / expected)[probabilities > 0].sum() < 37.4  # 1 in 10,000, 11 degrees of freedom


MIX = [{}, DRAWN, DRAWN | {"top_k": 5}, DRAWN | {"top_p": 0.8, "temperature": 0.7}, DRAWN | {"min_p": 0.1},
       {"min_length": 30}, DRAWN | {"min_new_tokens": 40}]
EDITED = [*STAGES.values(), *(DRAWN | LATE[name] for name in LATE), DRAWN | STAGES["sequence bias"]]


@pytest.mark.parametrize("vocab_size", [VOCAB, 2500])
def test_neutral_rows_beside_edited_ones_get_the_plain_samplers_tokens(vocab_size):
    rows = random_rows(8, 120, vocab_size, [one for pair in zip(MIX * 5, EDITED, strict=False) for one in pair])
    batch, logits = Batch(rows), random_logits(9, len(rows), vocab_size)
    history = batch.history.clone()
    plain = sample(logits, batch.sampling, batch.slots, batch.position, history)
    tokens = batch.sample(logits)
    neutral = torch.tensor([not row.edits.features() for row in rows])
    assert torch.equal(tokens[neutral], plain[neutral])
    assert not torch.equal(tokens[~neutral], plain[~neutral])
    assert neutral.sum() > 40
    assert torch.equal(batch.history[batch.slots[neutral]], history[batch.slots[neutral]])


def test_rows_side_by_side_get_the_tokens_that_they_get_alone():
    rows = random_rows(10, 60, VOCAB, EDITED)
    logits, batch = random_logits(11, 60, VOCAB), Batch(rows)
    tokens = batch.sample(logits)
    alone = [Batch([row]).sample(logits[number][None]) for number, row in enumerate(rows)]
    assert torch.equal(tokens, torch.cat(alone))


def test_the_new_token_is_written_behind_the_others():
    rows = random_rows(12, 12, VOCAB, EDITED)
    batch, logits = Batch(rows), random_logits(13, 12, VOCAB)
    logits[4] = torch.nan
    expected = batch.history.clone()
    tokens = batch.sample(logits)
    assert tokens[4] == -1
    expected[batch.slots, batch.position] = tokens.clamp(min=0).int()
    assert torch.equal(batch.history, expected)


# -- rows that cannot be sampled ------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("setting", [{}, DRAWN, DRAWN | {"typical_p": 0.9}, DRAWN | {"top_k": 4},
                                     DRAWN | {"temperature": 0.5}, DRAWN | {"temperature": 2.0}])
@pytest.mark.parametrize("cured", [False, True])
def test_a_row_is_invalid_where_stock_trips_on_what_is_left_of_it(bad, setting, cured):
    rows = [Row([3, 4], 1, setting | ({"remove_invalid_values": True} if cured else {"suppress_tokens": [9]}), seed=i)
            for i in range(4)]
    logits = random_logits(14, 4, VOCAB)
    logits[0, 5] = logits[1, :] = bad
    batch = Batch(rows)
    logprob = torch.zeros(4)
    tokens = batch.sample(logits, logprob=logprob)
    for number, row in enumerate(rows):
        final = row.stock(logits[number])
        if setting:
            probabilities = final.softmax(-1)
            allowed = probabilities > 0
            valid = bool(probabilities.isfinite().all())
        else:
            allowed = final == final.amax()
            valid = not final.isnan().any()
        assert (tokens[number] >= 0) == valid, (number, final)
        assert not setting or logprob[number].isnan() != valid
        assert not valid or allowed[tokens[number]]


def test_a_row_without_an_allowed_token_is_drawn_evenly_once_invalid_values_are_removed():
    setting = DRAWN | {"suppress_tokens": [], "bad_words_ids": [[i] for i in range(8)], "remove_invalid_values": True}
    batch = Batch([Row([3], 1, setting, eos=(20,), seed=number) for number in range(2000)], capacity=4)
    counts = batch.sample(torch.zeros(2000, 8)).bincount(minlength=8)
    assert counts.min() > 180


# -- slots ------------------------------------------


def test_a_slot_forgets_its_former_request():
    rows = random_rows(15, 24, VOCAB, EDITED)
    batch, logits = Batch(rows), random_logits(16, 24, VOCAB)
    features = batch.features
    for shift in (1, 2, 3):
        batch.rows = rows[shift:] + rows[:shift]
        batch.put()
        fresh = Batch(batch.rows)
        expected = edited_scores(logits, fresh.sampling, fresh.state.table, fresh.slots, batch.position,
                                 batch.history, features)
        assert torch.equal(fresh.slots, batch.slots)
        actual = edited_scores(logits, fresh.sampling, batch.state.table, *batch.arguments[2:-1], features)
        assert same(actual, expected)
    batch.state.put(batch.slots.numpy(), [row_of(Edits(), 1, 9, (1,))] * 24)
    neutral, table = EditState(len(batch.history) - 1, torch.device("cpu")), batch.state.table
    for mine, theirs in zip([*table[:-2], *table.lines.values()], [*neutral.table[:-2], *neutral.table.lines.values()],
                            strict=True):
        assert torch.equal(mine, theirs)


def test_equal_settings_share_a_line_and_tables_move_only_to_grow(monkeypatch):
    monkeypatch.setattr(edit_lines, "_FIRST_LINES", 1)
    monkeypatch.setattr(edit_lines, "_FIRST_WIDTH", 1)
    state = EditState(8, torch.device("cpu"))
    words = Edits(bad_words_ids=((1, 2), (3,)))

    def put(slots, *edits):
        state.put(np.array(slots), [row_of(each, 1, 9, (1,)) for each in edits])

    assert state.generation == 0
    put([0, 1, 2], words, words, words)
    moved = state.generation
    assert moved > 0
    assert state.table.lines["bad_words"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    for slot in range(8):
        put([slot], words)
    put(list(range(8)), *[Edits()] * 8)
    put([5], Edits(bad_words_ids=((4,),)))  # takes the line that nobody uses
    assert state.table.lines["bad_words"].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert state.generation == moved
    put([6], Edits(suppress_tokens=(1, 2, 3)))
    assert state.generation > moved


@pytest.mark.parametrize("first", [1, 8])
def test_lines_hold_their_settings_through_any_changes(monkeypatch, first):
    monkeypatch.setattr(edit_lines, "_FIRST_LINES", first)
    monkeypatch.setattr(edit_lines, "_FIRST_WIDTH", first)
    lines, g = SharedLines(torch.device("cpu")), np.random.default_rng(1)
    held = {}
    for _ in range(200):
        slots = g.choice(6, int(g.integers(1, 6)), replace=False).tolist()
        settings = [tuple(g.integers(0, 3, int(g.integers(0, 4))).tolist()) for _ in slots]
        encoded = [encode_tokens(setting).tobytes() for setting in settings]
        for slot, setting, line in zip(slots, settings, lines.assign(slots, encoded), strict=True):
            held[slot] = (setting, line)
        for setting, line in held.values():
            count, *tokens = lines.table[line].tolist()
            assert tuple(tokens[:count]) == setting
    assert len(lines.table) <= 16


def test_padding_rows_change_nothing():
    """Rows that pad a graph: the spare slot, position 0."""
    rows = random_rows(17, 5, VOCAB, [DRAWN | {"repetition_penalty": 1.2, "typical_p": 0.9}, *STAGES.values()])
    logits = random_logits(18, 8, VOCAB)
    alone, batch = Batch(rows), Batch(rows)
    padding = len(batch.history) - 1
    slots = torch.cat([batch.slots, torch.full((3,), padding)])
    position = torch.cat([batch.position, torch.zeros(3, dtype=torch.int64)]).int()
    features = frozenset().union(*(Row([1], 1, one).edits.features() for one in EDITED))
    tokens = sample_edited(logits, batch.sampling, batch.state, slots, position, batch.history, features)
    assert torch.equal(tokens[:5], alone.sample(logits[:5]))
    assert torch.equal(batch.history[:padding], alone.history[:padding])


def test_features_name_what_is_needed():
    assert Edits().features() == frozenset()
    assert Edits(also_seen=(3,)).features() == frozenset()
    assert Edits(repetition_penalty=1.1, decay_start=0, eta_cutoff=0.1).features() == {
        "repetition_penalty", "decay", "eta",
    }
    names = {name for settings in EDITED for name in Row([1], 1, settings).edits.features()}
    assert len(names) == 15


def test_filtered_rows_here_are_the_samplers():
    """`warped_scores` is `processed_scores` without its looks at the settings."""
    batch = Batch(random_rows(19, 40, VOCAB, [s for s in MIX if s.get("do_sample")]))
    scores = random_logits(20, 40, VOCAB).round()
    rows = batch.sampling_rows()
    assert torch.equal(warped_scores(scores, rows), processed_scores(scores, rows))
