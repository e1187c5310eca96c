"""The board between a manager and its thread: who is open, and who hears what."""

from __future__ import annotations

from hf_paged.integration.batching_board import RequestBoard
from hf_paged.integration.batching_requests import BatchedRequest


def _request(name):
    return BatchedRequest(name, [1, 2], 3, None, False, False, {}, None)


def test_cancelling_a_request_cancels_its_children_and_nobody_elses():
    """Children of `num_return_sequences` have ids of their own, which no caller made up."""
    board = RequestBoard()
    wanted, other = _request("a").copies(3), _request("ab").copies(2)
    board.add([*wanted, *other], limit=0)
    board.cancel("a")
    assert set(board.open) == {"ab", "ab__child#0"}
    arrivals, cancelled = board.take_news()
    assert arrivals == other
    assert cancelled == [wanted[-1], *wanted[:-1]] and all(request.is_cancelled for request in wanted)
    board.deliver([(request, request.finish()) for request in [*wanted, *other]])
    heard = [board.outputs.take(None, 0.0, lambda: False) for _ in range(3)]
    assert [output and output.request_id for output in heard] == ["ab__child#0", "ab", None]


def test_children_that_run_are_cancelled_too():
    board = RequestBoard()
    requests = _request("a").copies(2)
    board.add(requests, limit=0)
    assert board.take_news() == (requests, [])
    board.cancel("a")
    assert board.take_news() == ([], [requests[1], requests[0]]) and not board.has_work()
