import pytest
from fake_model import Driver, config

from hf_paged.scheduler import Sequence, Status
from hf_paged.scheduler.sequence import WaitingQueue


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        Sequence("a", [], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        Sequence("a", [1], max_new_tokens=-1)


def test_tokens_read_the_same_waiting_running_and_finished():
    driver = Driver(config())
    seq = driver.add("a", [5, 6, 7], max_new_tokens=4)
    assert (seq.status, seq.slot, seq.token_ids, seq.num_tokens) == (Status.WAITING, -1, [5, 6, 7], 3)
    seen = []
    for step in range(4):
        driver.step()
        seen.append(seq.output_token_ids)
        assert seq.num_output_tokens == step + 1
        assert seq.token_ids == [5, 6, 7] + seen[-1]
        assert seq.status == (Status.RUNNING if step < 3 else Status.FINISHED)
    assert [out[: i + 1] for i, out in enumerate([seen[-1]] * 4)] == seen
    assert seq.slot == -1
    assert seq.block_table == []
    assert seq.num_computed_tokens == 6  # the last token's KV was never needed


def test_token_lists_that_are_handed_out_are_copies():
    seq = Sequence("a", [1, 2], max_new_tokens=1)
    seq.prompt_token_ids.append(3)
    seq.token_ids.append(4)
    seq.output_token_ids.append(5)
    assert seq.token_ids == [1, 2]


def test_history_grows_past_its_first_columns():
    driver = Driver(config(num_blocks=400, max_model_len=1000, max_num_batched_tokens=500))
    long = driver.add("a", [i % 97 for i in range(250)], max_new_tokens=12)
    longer = driver.add("b", [i % 89 for i in range(600)], max_new_tokens=4, eos_token_ids=(1000, 1001, 1002))
    driver.run()
    driver.check_output(long)
    driver.check_output(longer)


def test_waiting_queue_orders_by_priority_then_arrival_and_skips_the_finished():
    queue = WaitingQueue()
    seqs = [Sequence(str(i), [1], max_new_tokens=1, priority=p) for i, p in enumerate([1, 0, 1, 0])]
    for i, seq in enumerate(seqs):
        seq.arrival = i
        queue.push(seq)
    seqs[3].status = Status.FINISHED
    queue.count_out(seqs[3])
    assert len(queue) == 3
    assert [queue.pop().request_id for _ in range(3)] == ["1", "0", "2"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_held_sequences_are_overtaken_until_they_are_released():
    queue = WaitingQueue()
    first, second, third = (Sequence(str(i), [1], max_new_tokens=1) for i in range(3))
    for i, seq in enumerate((first, second, third)):
        seq.arrival = i
        queue.push(seq)
    queue.hold(first)
    queue.hold(third)
    assert len(queue) == 3 and set(queue.sequences()) == {first, second, third}
    assert queue.pop() is second and queue.peek() is None
    third.status = Status.FINISHED
    queue.count_out(third)
    queue.release(first)
    assert len(queue) == 1 and queue.pop() is first and not queue.held
