"""The board between a manager and its thread: who is open, and who hears what."""

from __future__ import annotations

import asyncio
import threading

from hf_paged.integration.continuous_batching.board import RequestBoard
from hf_paged.integration.continuous_batching.requests import BatchedRequest


def _board():
    changed = threading.Condition()
    return RequestBoard(lambda: changed)


def _request(name):
    return BatchedRequest(name, [1, 2], 3, None, False, False, {}, None)


def test_cancelling_a_request_cancels_its_children_and_nobody_elses():
    """Children of `num_return_sequences` have ids of their own, which no caller made up."""
    board = _board()
    wanted, other = _request("a").copies(3), _request("ab").copies(2)
    board.add([*wanted, *other], limit=0)
    board.cancel("a")
    assert set(board.open) == {"ab", "ab__child#0"}
    arrivals, cancelled = board.take_changes()
    assert arrivals == other
    assert cancelled == [wanted[-1], *wanted[:-1]] and all(request.is_cancelled for request in wanted)
    board.deliver([(request, request.finish()) for request in [*wanted, *other]])
    heard = [board.take(None, 0.0, lambda: False) for _ in range(3)]
    assert [output and output.request_id for output in heard] == ["ab__child#0", "ab", None]


def test_children_that_run_are_cancelled_too():
    board = _board()
    requests = _request("a").copies(2)
    board.add(requests, limit=0)
    assert board.take_changes() == (requests, [])
    board.cancel("a")
    assert board.take_changes() == ([], [requests[1], requests[0]])


def test_outputs_of_a_cancelled_request_are_gone_and_nobody_with_its_id_gets_them():
    board = _board()
    old, other, new = _request("a"), _request("b"), _request("a")
    board.add([old, other], limit=0)
    board.deliver([(old, old.output()), (other, other.output())])
    board.cancel("a")
    board.add([new], limit=0)
    assert board.take("a", 0.0, lambda: False) is None
    assert board.take(None, 0.0, lambda: False).request_id == "b"


def test_a_handler_that_raises_keeps_no_output_from_the_others():
    board, heard = _board(), []
    requests = [_request(name) for name in "abc"]
    board.add(requests, limit=0)

    def raising(output):
        raise ValueError(output.request_id)

    async def listen():
        for request in requests:
            board.register(request.request_id, raising if request is requests[0] else heard.append)
        board.deliver([(request, request.finish()) for request in requests])
        await asyncio.sleep(0.01)

    asyncio.run(listen())
    assert [output.request_id for output in heard] == ["b", "c"]
