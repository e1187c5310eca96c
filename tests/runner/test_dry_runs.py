"""The list of steps on padding: which come, in which order, and that they leave what requests read as it is."""

from __future__ import annotations

from itertools import pairwise

import torch

from hf_paged.runner.dry_runs import OPTIONAL_EDITS, dry_runs, far_apart
from hf_paged.sampling.edit_reference import STAGES
from hf_paged.sampling.log_probs import LOGPROBS


def test_sizes_far_apart():
    assert [far_apart(range(n)) for n in range(6)] == [[], [0], [0, 1], [0, 2, 1], [0, 3, 1, 2], [0, 4, 2, 1, 3]]
    for n in range(200):
        found = far_apart(range(n))
        assert sorted(found) == list(range(n))
        # After 2 ** k + 1 of them no more than n / 2 ** k that follow each other are left.
        for k in range(n.bit_length()):
            taken = sorted(found[: 2**k + 1])
            assert all(b - a <= -(-n // 2**k) for a, b in pairwise(taken))


def test_decode_rows_that_come_are_far_apart_and_no_more_than_wanted(steps):
    coming = [run for run in dry_runs(steps, 8, 64) if run.func.__name__ == "run_padding_rows"]
    assert [run.args[0] for run in coming if not run.keywords] == [1, 8, 2, 4]
    assert steps.decode_sizes.tolist()[:4] == [1, 2, 4, 8]
    assert [run.args[0] for run in dry_runs(steps, 3) if not run.keywords] == [1, 2]
    assert [run.args[0] for run in dry_runs(steps, 1)] == [1]


def test_rows_that_share_a_prefix_or_name_an_adapter_come_too(steps):
    def coming(word):
        return [(run.func.__name__, *run.args) for run in dry_runs(steps, 8, 64) if word in run.keywords]

    assert coming("shared") == [("run_padding_rows", 8), ("run_padding_tokens", 64)]
    assert coming("long") == [("run_padding_tokens", 64)] and not coming("named")
    steps.state.adapters.use_entries(("one", "two"))
    rows, prompts = ([(f"run_padding_{what}", n) for n in sizes]
                     for what, sizes in {"rows": [1, 8, 2, 4], "tokens": [16, 32, 64]}.items())
    assert coming("named") == rows + prompts
    with torch.no_grad():
        for run in dry_runs(steps, 8, 64):
            run()


def test_what_comes_begins_with_a_row_and_few_tokens(steps):
    """A queue of tiles needs no step of its own: it is no constant of the kernel."""
    coming = list(dry_runs(steps, 8, 64))
    assert [(run.func.__name__, *run.args) for run in coming[:2]] == [
        ("run_padding_rows", 1), ("run_padding_tokens", 16)]
    assert not any("queued" in run.keywords for run in coming)
    with torch.no_grad():
        for run in coming:
            run()


def test_optional_features_come_last_and_by_themselves_and_together(steps):
    plain, every = list(dry_runs(steps, 8, 64)), list(dry_runs(steps, 8, 64, optional=True))
    optional = every[len(plain):]
    assert [(run.func.__name__, *run.args) for run in every[: len(plain)]] == [
        (run.func.__name__, *run.args) for run in plain]
    drawn = [run.keywords for run in optional if "stages" in run.keywords]
    assert {run["scored"] for run in drawn} == {(), LOGPROBS}
    assert frozenset.union(*(run["stages"] for run in drawn)) == OPTIONAL_EDITS < STAGES.keys()
    assert sum(run.func.__name__ == "run_masked_padding" for run in optional) == 2
    sizes = [run.args[0] for run in optional if run.func.__name__ == "run_padding_rows" and not run.keywords]
    assert sizes == [16, 32, 48, 64, 96, 128], "rows of guesses may be more than requests"
    assert not any(run.keywords.get("named") for run in optional)
    steps.state.adapters.use_entries(("one",))
    assert not any(run.keywords.get("named") for run in dry_runs(steps, 8, 64))
    assert any(run.keywords.get("named") for run in dry_runs(steps, 8, 64, optional=True))


def test_what_requests_read_is_the_same_after_all_of_them(steps):
    """On a CPU they are carried out: every write has to go to the padding slot, and to the null block."""
    for tensor in (tensor for pair in steps._cache.layers for tensor in pair):
        tensor.zero_()  # memory as it comes may hold NaN, which equals nothing
    state, table = steps.state, steps.state.edits.table
    of_slots = [state.tokens, state.block_table, *state.sampling, table.repetition_penalty, *table.lines.values()]
    rest = [*table.lists.values()]
    before = [tensor[:-1].clone() for tensor in of_slots], [tensor.clone() for tensor in rest]
    moves, generation = dict(state.moves), state.edits.generation
    blocks = [tensor[1:].clone() for pair in steps._cache.layers for tensor in pair]
    with torch.no_grad():
        for run in dry_runs(steps, 8, 64, optional=True):
            run()
    assert all(torch.equal(tensor[:-1], old) for tensor, old in zip(of_slots, before[0], strict=True))
    assert all(torch.equal(tensor, old) for tensor, old in zip(rest, before[1], strict=True))
    kept = [tensor[1:] for pair in steps._cache.layers for tensor in pair]
    assert all(torch.equal(tensor, old) for tensor, old in zip(kept, blocks, strict=True))
    assert (dict(state.moves), state.edits.generation, state._stage_names) == (moves, generation, [])
