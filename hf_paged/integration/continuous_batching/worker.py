"""What the thread of a continuous batching manager does: requests into the engine, tokens out of it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.engine import Engine
from hf_paged.engine.session import NewRequest, Session
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


class BatchingWorker:
    """The loop over one engine. Requests whose tokens are looked at one by one have a session that streams.

    Args:
        engine: that runs the requests.
        board: where they come from and their outputs go.
        wait_for_work: waits, and calls its argument before a pause; False: the loop shall end.
        on_end: called once with what ended the loop before its time, or None.
    """

    def __init__(self, engine: Engine, board: RequestBoard, wait_for_work: Callable[[Callable[[], None]], bool],
                 on_end: Callable[[BaseException | None], None]) -> None:
        self._engine = engine
        self._board = board
        self._wait_for_work = wait_for_work
        self._on_end = on_end
        self._device = engine.model.device
        self._running: dict[str, tuple[BatchedRequest, Session]] = {}  # by the engine's id
        self._arrived: list[BatchedRequest] = []  # and not given to the engine yet

    def run(self) -> None:
        """Until `wait_for_work` returns False. A step that breaks fails what was running, and the loop goes on."""
        error: BaseException | None = None
        try:
            while not self._run_until_it_breaks():
                pass
        except BaseException as raised:
            error = raised
            logger.error("hf_paged: continuous batching ended by %r", raised, exc_info=raised)
        finally:
            self._on_end(error)

    def _run_until_it_breaks(self) -> bool:
        """True once `wait_for_work` returned False; False where the engine raised: new sessions have to be made."""
        try:
            with self._engine.session(stream=True, text=False) as streams, self._engine.session(text=False) as others:
                while self._wait_for_work(self._settle):
                    arrivals, cancelled = self._board.take_changes()
                    self._arrived = arrivals
                    self._abort(cancelled)
                    self._admit(streams, others)
                    self._step([streams, others])
                self._abort(self._running_requests())
                self._collect([streams, others])
        except Exception as error:
            if not self._running and not self._arrived:
                raise  # no request is to blame, and nothing would be different the next time
            logger.error("hf_paged: the engine broke in continuous batching: %r", error, exc_info=error)
            self._fail([*self._running_requests(), *self._arrived], f"{BROKE}{error!r}")
            self._running.clear()
            return False
        return True

    def _fail(self, requests: list[BatchedRequest], error: str) -> None:
        self._board.deliver([(request, failed_output(request, error)) for request in requests])

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _admit(self, streams: Session, others: Session) -> None:
        """Give the engine what it can run; the rest ends here, each with its own error."""
        refused: list[tuple[BatchedRequest, GenerationOutput]] = []
        reason = self._engine.unsupported_reason() if self._arrived else None
        autocast = self._engine.autocast_of_call() if self._arrived and reason is None else None
        for request in self._arrived:
            try:
                if reason is not None:
                    raise ValueError(f"the model cannot run on the paged engine as it is now: {reason}")
                prompt = self._engine.check_prompt(request.prompt)
                settings = request_settings(self._engine, request)
                session = streams if request.needs_tokens else others
                request.start()
                stop = stop_rule(self._engine, settings, request)
                new = NewRequest(prompt, settings, seed=request.seed, stop=stop, grammar=request.form.grammar,
                                 autocast=autocast)
                engine_id = self._engine.add(session, new)
                self._running[engine_id] = request, session
            except Exception as error:
                refused.append((request, failed_output(request, Refused(error))))
        self._arrived = []
        self._board.deliver(refused)

    def _running_requests(self) -> list[BatchedRequest]:
        return [request for request, _ in self._running.values()]

    def _abort(self, requests: list[BatchedRequest]) -> None:
        ids = {id(request) for request in requests}
        for engine_id in [key for key, (request, _) in self._running.items() if id(request) in ids]:
            try:
                self._engine.abort(engine_id)
            except KeyError:
                continue  # it has ended: its completion is on the way

    def _step(self, sessions: list[Session]) -> None:
        self._collect(sessions)
        for session in sessions:
            if self._running and not session.unfinished():
                self._fail_lost(session)

    def _collect(self, sessions: list[Session]) -> None:
        unfinished = [session for session in sessions if session.unfinished()]
        outputs = self._engine.advance(unfinished) if unfinished else []
        delivered: list[tuple[BatchedRequest, GenerationOutput]] = []
        for output in itertools.chain(*outputs):
            request, _ = self._running[output.request_id]
            if output.completion is not None:
                del self._running[output.request_id]
            if request.is_failed:
                continue
            try:
                made = self._take(request, output)
            except Exception as error:  # this request's own: the others' outputs still have to be handed over
                request.is_failed = True
                self._abort([request])
                made = failed_output(request, f"this request failed: {error!r}")
            if made is not None:
                delivered.append((request, made))
        if delivered:
            self._board.deliver(delivered)

    def _take(self, request: BatchedRequest, output: StepOutput) -> GenerationOutput | None:
        """What one output of the engine brings for its request."""
        if output.new_token_ids:
            request.extend(output.new_token_ids, output.new_logprobs, output.new_top_logprobs)
        if output.completion is not None:
            return request.finish(_error(request, output), output.finish_reason)
        return request.output() if request.streaming else None

    def _fail_lost(self, session: Session) -> None:
        """`disable` ends requests without an output."""
        lost = [key for key, (_, its_session) in self._running.items() if its_session is session]
        failed = [self._running.pop(key)[0] for key in lost]
        self._fail(failed, "the model was disabled, or enabled anew, while this request ran")


def _error(request: BatchedRequest, output: StepOutput) -> str | None:
    assert output.completion is not None
    if output.finish_reason == "error":
        return output.completion.error
    if output.finish_reason == "abort":
        return "the manager was stopped before this request was done"
    if output.finish_reason == "length" and request.is_cut:
        return NoRoom(f"stopped after {len(request.tokens)} new tokens: the model or the KV pool has no room for more")
    return None
