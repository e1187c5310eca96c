"""Which forms are compiled at a time: short ones do not wait for slow ones, and slow ones come to an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_paged.engine.structured.form_queue import TURN, FormQueue, Job
from hf_paged.options.structured import Structured


def job(number, seconds=10.0):
    return Job(number, 0, Structured("regex", str(number)), seconds)


def numbers(jobs):
    return [one.number for one in jobs]


def test_a_short_form_takes_the_place_of_one_that_had_its_turn():
    queue = FormQueue(2)
    for number in range(2):
        queue.add(job(number))
    assert numbers(queue.change(0.0).begun) == [0, 1]
    queue.add(job(2))
    assert queue.change(TURN / 2) == ([], [], [])
    changes = queue.change(TURN)
    assert (numbers(changes.stopped), numbers(changes.begun)) == ([0], [2])  # the first of those that ran as long
    queue.remove(changes.begun[0])
    assert numbers(queue.change(TURN + 0.1).begun) == [0]  # again, from its beginning


def test_one_slow_form_always_goes_on():
    queue = FormQueue(2)
    slow = [job(0), job(1)]
    for one in slow:
        queue.add(one)
    queue.change(0.0)
    queue.add(job(2))
    queue.add(job(3))
    changes = queue.change(1.0)
    assert (numbers(changes.stopped), numbers(changes.begun)) == ([0], [2])
    assert slow[1] in queue.running
    queue.remove(changes.begun[0])
    assert numbers(queue.change(1.1).begun) == [3]


def test_a_form_that_takes_longer_than_its_limit_is_late():
    queue = FormQueue(2)
    queue.add(job(0, seconds=3.0))
    queue.change(1.0)
    assert queue.wait(1.0) == 3.0 and queue.change(3.9) == ([], [], [])
    assert numbers(queue.change(4.0).late) == [0] and queue.running == []
    assert queue.wait(4.0) is None


def test_a_short_form_does_not_wait_for_all_slow_ones_that_came_before():
    """And those that came first do not wait for ever for ones that come later."""
    queue, now, short = FormQueue(2), 0.0, job(1000)
    for number in range(100):
        queue.add(job(number))
    while now < 1.0:
        queue.change(now)
        now += 0.05
    queue.add(short)
    while short not in queue.running:
        queue.change(now)
        now += 0.05
    assert now < 1.0 + 3 * TURN
    queue, number = FormQueue(2), 0
    queue.add(waits := job(-1))
    queue.add(job(-2))
    queue.add(job(-3))
    while waits.started is None and number < 1000:
        queue.add(job(number))
        queue.change(number * TURN)
        number += 1
    assert number < 10


TIMES = st.lists(st.floats(0.01, 6.0), min_size=1, max_size=25)


@given(needed=TIMES, arrivals=st.lists(st.floats(0.0, 5.0), min_size=25, max_size=25), places=st.integers(2, 4))
def test_every_form_ends_by_itself_or_late(needed, arrivals, places):
    """As a process would have it that takes `needed` seconds for each, if nothing stops it."""
    queue, now, ended, jobs = FormQueue(places), 0.0, {}, [job(i, seconds=3.0) for i in range(len(needed))]
    coming = sorted(zip(arrivals, jobs, strict=False), key=lambda pair: (pair[0], pair[1].number))
    for _ in range(5000):
        while coming and coming[0][0] <= now:
            queue.add(coming.pop(0)[1])
        for one in [one for one in queue.running if now - one.started >= needed[one.number]]:
            queue.remove(one)
            ended[one.number] = "done"
        changes = queue.change(now)
        ended |= dict.fromkeys(numbers(changes.late), "late")
        assert len(queue.running) <= places
        if len(ended) == len(jobs):
            break
        times = [one.started + needed[one.number] for one in queue.running] + [at for at, _ in coming[:1]]
        wait = queue.wait(now)
        now = max(now + 1e-6, min([*times, *([] if wait is None else [now + wait])]))
    assert len(ended) == len(jobs)
    assert all(what == "done" for number, what in ended.items() if needed[number] < 2.9)
    assert all(what == "late" for number, what in ended.items() if needed[number] > 3.1)
