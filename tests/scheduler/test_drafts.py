"""Steps in which sequences take guesses at what follows: right ones save steps, wrong ones change nothing."""

import numpy as np
import pytest
from brute_groups import check_groups
from fake_model import Driver, alone, config

from hf_paged.scheduler import Status
from hf_paged.scheduler.prefix_tree import PrefixGroups, repeated

PROMPT = [3, 1, 4, 1, 5]
WRONG = 96


def driver(**changes) -> Driver:
    return Driver(config(**changes))


def truth(seq, max_model_len=64):
    """What the model makes after the sequence's tokens, whatever ends it."""
    endless = type(seq)("truth", seq.prompt_token_ids, max_new_tokens=max_model_len)
    return alone(endless, max_model_len)[0][seq.num_output_tokens :]


def test_right_guesses_are_taken_and_save_steps():
    d = driver()
    seq = d.add("a", PROMPT, 13)
    d.draft = lambda seq: truth(seq)[:3]
    d.run()
    d.check_output(seq)
    # The prompt's step makes one token, each of three more makes four.
    assert [len(plan.slots) for plan in d.plans] == [1, 4, 4, 4]


@pytest.mark.parametrize("right", range(4))
def test_what_stands_before_the_first_wrong_guess_is_taken(right):
    d = driver()
    seq = d.add("a", PROMPT, 13)
    d.step()
    d.draft = lambda seq: [*truth(seq)[:right], WRONG, *truth(seq)[right + 1 : 4]]
    d.step()
    assert seq.output_token_ids == alone(seq, 64)[0][: right + 2]
    d.run()
    d.check_output(seq)


def test_a_guess_that_comes_true_behind_a_wrong_one_does_not_count():
    """Its logits were computed behind the wrong token."""
    d = driver()
    seq = d.add("a", PROMPT, 13)
    d.step()
    first, second = truth(seq)[:2]
    plan = d.scheduler.schedule({seq.slot: [WRONG, second]})
    result = d.scheduler.commit(plan, np.array([first, second, 0]))
    assert seq.output_token_ids[-1] == first
    assert result.accepted.tolist() == [0]


def test_an_end_among_the_guesses_ends_there():
    d = driver()
    probe = d.add("probe", PROMPT, 13)
    d.run()
    eos = probe.output_token_ids[4]
    seq = d.add("a", PROMPT, 13, eos_token_ids=(eos,))
    d.draft = lambda seq: truth(seq)[:7]
    d.run()
    d.check_output(seq)
    assert seq.finish_reason == "eos"


def test_what_stands_behind_a_caller_s_last_token_does_not_count():
    d = driver()
    seqs = [d.add(name, [*PROMPT, n], 13) for n, name in enumerate("ab")]
    d.step()
    tokens = [truth(seq)[:3] for seq in seqs]
    plan = d.scheduler.schedule({seq.slot: truth(seq)[:2] for seq in seqs})
    result = d.scheduler.commit(plan, np.array([*tokens[0], *tokens[1]]), last=[1])
    assert result.accepted.tolist() == [0, 1, 3, 4, 5]
    assert [seq.output_token_ids[1:] for seq in seqs] == [tokens[0][:2], tokens[1]]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 6])
def test_no_guess_reaches_beyond_the_last_token(max_new_tokens):
    d = driver()
    seq = d.add("a", PROMPT, max_new_tokens)
    d.draft = lambda seq: truth(seq)[:7]
    d.run()
    d.check_output(seq)
    assert all(plan.start.max() + 2 <= len(PROMPT) + max_new_tokens for plan in d.plans[1:])


def test_guesses_preempt_nobody_and_take_only_free_blocks():
    """Two sequences fill the pool: what has no room in a sequence's last block is not tried."""
    d = driver(num_blocks=5, block_size=4)
    seqs = [d.add(name, [n, 2, 3, 4, 5], 2) for n, name in enumerate("ab")]
    d.step()
    assert d.scheduler.num_free_blocks == 0
    plan = d.scheduler.schedule({seq.slot: [9] * 7 for seq in seqs})
    assert d.scheduler.num_preemptions == 0
    assert len(plan.slots) == 2  # the last token needs no guess behind it
    longer = driver(num_blocks=5, block_size=4)
    seqs = [longer.add(name, [n, 2, 3, 4, 5], 9) for n, name in enumerate("ab")]
    longer.step()
    plan = longer.scheduler.schedule({seq.slot: [9] * 7 for seq in seqs})
    assert longer.scheduler.num_preemptions == 0
    assert plan.start.tolist() == [5, 6, 7] * 2


def test_a_block_that_guesses_need_is_taken_where_one_is_free():
    d = driver(block_size=4)
    seq = d.add("a", PROMPT, 20)
    d.step()
    plan = d.scheduler.schedule({seq.slot: truth(seq)[:7]})
    assert plan.start.tolist() == list(range(5, 12))  # to the end of the block that was added
    assert len(seq.block_table) == 3
    assert plan.block_updates.block_ids.tolist() == seq.block_table[2:]


def test_guesses_stay_within_the_step_s_tokens():
    d = driver(max_num_batched_tokens=6)
    seqs = [d.add(str(n), [n, 2], 20) for n in range(4)]
    d.step()
    d.step()
    plan = d.scheduler.schedule({seq.slot: truth(seq)[:3] for seq in seqs})
    assert plan.num_tokens == 6
    assert (plan.drafts >= 0).sum() == 2


@pytest.mark.parametrize("prompt", [[7], [7] * 20])
def test_guesses_leave_prompts_room_in_the_step(prompt):
    """Else who guesses right would take all of a small step, until its end."""
    d = driver(max_num_batched_tokens=8, max_num_seqs=2, block_size=16)
    a = d.add("a", PROMPT, 50)
    d.draft = lambda seq: truth(seq)[:7]
    d.step()
    b = d.add("b", prompt, 2)
    while b.status is not Status.FINISHED:
        d.step()
    assert a.status is Status.RUNNING
    d.run()
    d.check_output(a)
    d.check_output(b)


def test_a_sequence_whose_token_is_in_flight_takes_no_guesses():
    d = driver()
    seq = d.add("a", PROMPT, 20)
    d.scheduler.schedule()
    with pytest.raises(ValueError, match="in flight"):
        d.scheduler.schedule({seq.slot: [1]})


def test_others_go_on_while_guesses_are_in_flight():
    d = driver()
    a, b = d.add("a", PROMPT, 20), d.add("b", [7, 8], 20)
    d.step()
    plan = d.scheduler.schedule({a.slot: [1, 2]})
    ahead = d.scheduler.schedule()
    assert [seq.request_id for seq in ahead.sequences] == ["b"]
    d.scheduler.commit(plan, np.array([5, 6, 7, 8]))
    d.scheduler.commit(ahead, np.array([9]))
    assert a.output_token_ids[1:] == [5]
    assert b.output_token_ids[1:] == [8, 9]
    assert d.scheduler.schedule().slots.tolist() == [a.slot, b.slot]


def test_invalid_logits_behind_right_guesses_end_the_sequence_with_these():
    d = driver()
    seq = d.add("a", PROMPT, 20)
    d.step()
    plan = d.scheduler.schedule({seq.slot: [11, 12, 13]})
    result = d.scheduler.commit(plan, np.array([11, 12, -1, 7]))
    assert result.accepted.tolist() == [0, 1]
    assert result.finished == [seq]
    assert seq.finish_reason == "error"
    assert seq.output_token_ids[1:] == [11, 12]


def test_a_sequence_that_lost_its_blocks_keeps_what_was_confirmed():
    d = driver()
    seq = d.add("a", PROMPT, 6)
    d.step()
    right = truth(seq)
    plan = d.scheduler.schedule({seq.slot: [*right[:2], WRONG]})
    tokens = d.model.launch(plan)
    assert d.scheduler.make_room(1)
    assert seq.status is Status.WAITING
    d.commit(plan, tokens)
    assert seq.output_token_ids[1:] == right[:3]
    d.run()
    d.check_output(seq)


def test_a_block_is_published_with_confirmed_tokens_alone():
    d = driver(block_size=4)
    seq = d.add("a", PROMPT, 20)
    d.step()
    right = truth(seq)
    d.draft = lambda seq: [right[0], WRONG, WRONG]
    d.step()
    assert seq.num_published == 1  # its second block holds two wrong tokens
    d.check_findable()
    d.draft = lambda seq: truth(seq)[:3]
    d.step()
    assert seq.num_published == 2
    d.check_findable()


def test_rows_of_one_sequence_are_a_group_in_those_of_its_prefix():
    tables = [[1, 2, 3, 4], [1, 2, 5], [9, 8], [7]]
    groups = PrefixGroups(*(np.array(x, np.int32) for x in ([0, 1], [0], [2], [0], [8])))
    copies, end = np.array([3, 1, 2, 2]), np.array([12, 8, 8, 0])
    found = repeated(groups, copies, end)
    each = [(tables[0][:3], 3), (tables[1], 1), (tables[2], 2), ([], 2)]
    check_groups(found, [table for table, count in each for _ in range(count)], 4)
    assert repeated(None, np.array([2, 1]), np.array([0, 8])) is None


def test_without_groups_rows_of_one_sequence_are_none():
    for group_prefixes in (True, False):
        d = driver(group_prefixes=group_prefixes, max_model_len=200)
        seq = d.add("a", list(range(90)), 20)
        for _ in range(3):
            d.step()
        assert (d.scheduler.schedule({seq.slot: [1, 2]}).groups is None) == (not group_prefixes)
