"""Requests of a continuous batching manager in its `EngineThread`, with outputs as transformers' `GenerationOutput`."""

from __future__ import annotations

import logging

from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine_call import EngineCall
from hf_paged.engine.session import NewRequest
from hf_paged.integration.continuous_batching.board import RequestBoard
from hf_paged.integration.continuous_batching.requests import (
    BatchedRequest,
    NoRoom,
    Refused,
    failed_output,
    request_settings,
    stop_rule,
)
from hf_paged.outputs import StepOutput

logger = logging.getLogger(__name__)

BROKE = "the engine broke while this request ran: "
_DISABLED = "the model was disabled, or enabled anew, while this request ran"


class BatchedCall(EngineCall):
    """Requests of a manager that share a session; their outputs go to the manager's board."""

    def __init__(self, thread: EngineThread, board: RequestBoard, *, stream: bool) -> None:
        super().__init__(stream=stream, text=False)
        self._thread, self._board = thread, board
        self._running: dict[str, BatchedRequest] = {}  # by the engine's id

    def add(self, request: BatchedRequest, new: NewRequest) -> None:
        """Queue a request; raises what `Engine.add` raises."""
        [added] = self._thread.add(self, [new])
        if isinstance(added, ValueError):
            raise added
        self._running[added] = request

    def abort(self, requests: list[BatchedRequest]) -> None:
        """Abort the requests among these that run in this call."""
        ids = {id(request) for request in requests}
        for engine_id in [key for key, request in self._running.items() if id(request) in ids]:
            try:
                self._thread.engine.abort(engine_id)
            except KeyError:
                continue  # it has ended, and the next outputs have its completion

    def take(self, outputs: list[StepOutput]) -> None:
        delivered: list[tuple[BatchedRequest, GenerationOutput]] = []
        for output in outputs:
            request = self._running[output.request_id]
            if output.completion is not None:
                del self._running[output.request_id]
            if request.is_failed:
                continue
            try:
                made = _taken(request, output)
            except Exception as error:  # fails this request alone: outputs of others still have to be handed over
                request.is_failed = True
                self.abort([request])
                made = failed_output(request, f"this request failed: {error!r}")
            if made is not None:
                delivered.append((request, made))
        self._board.deliver(delivered)

    def fail(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("hf_paged: the engine broke in continuous batching: %r", error, exc_info=error)
        failed, self._running = list(self._running.values()), {}
        self._board.fail(failed, _DISABLED if error is None else f"{BROKE}{error!r}")

    def stop(self) -> None:
        self.abort(list(self._running.values()))


class BatchedCalls:
    """All requests of one manager; requests with `needs_tokens` have a session that streams."""

    def __init__(self, thread: EngineThread, board: RequestBoard) -> None:
        self._thread, self._board = thread, board
        self._streams, self._others = (BatchedCall(thread, board, stream=stream) for stream in (True, False))

    def take_changes(self) -> None:
        """Begin new requests, and abort cancelled ones; runs in the thread."""
        arrivals, cancelled = self._board.take_changes()
        try:
            for call in (self._streams, self._others):
                call.abort(cancelled)
            self._begin(arrivals)
        except Exception as error:
            self._board.fail(arrivals, f"{BROKE}{error!r}")
            raise  # the thread fails the requests that run

    def _begin(self, arrivals: list[BatchedRequest]) -> None:
        """Add the requests that can run to the engine; each other request ends with its own error."""
        engine = self._thread.engine
        refused: list[tuple[BatchedRequest, GenerationOutput]] = []
        reason = engine.unsupported_reason() if arrivals else None
        autocast = engine.autocast_of_call() if arrivals and reason is None else None
        for request in arrivals:
            try:
                if reason is not None:
                    raise ValueError(f"the model cannot run on the paged engine as it is now: {reason}")
                prompt = engine.check_prompt(request.prompt)
                settings = request_settings(engine, request)
                request.start()
                stop = stop_rule(engine, settings, request)
                new = NewRequest(prompt, settings, seed=request.seed, stop=stop, grammar=request.form.grammar,
                                 autocast=autocast)
                (self._streams if request.needs_tokens else self._others).add(request, new)
            except Exception as error:
                refused.append((request, failed_output(request, Refused(error))))
        self._board.deliver(refused)


def _taken(request: BatchedRequest, output: StepOutput) -> GenerationOutput | None:
    """Return the `GenerationOutput` of one output of the engine; None if the request does not stream and goes on."""
    if output.new_token_ids:
        request.extend(output.new_token_ids, output.new_logprobs, output.new_top_logprobs)
    if output.completion is not None:
        return request.finish(_error(request, output), output.finish_reason)
    return request.output() if request.streaming else None


def _error(request: BatchedRequest, output: StepOutput) -> str | None:
    assert output.completion is not None
    if output.finish_reason == "error":
        return output.completion.error
    if output.finish_reason == "abort":
        return "the manager was stopped before this request was done"
    if output.finish_reason == "length" and request.is_cut:
        return NoRoom(f"stopped after {len(request.tokens)} new tokens: the model or the KV pool has no room for more")
    return None
