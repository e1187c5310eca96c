"""What the thread of a continuous batching manager does: requests into the engine, tokens out of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine import Engine
from hf_paged.integration.batching_requests import BatchedRequest, NoRoom, Refused, request_settings
from hf_paged.outputs import StepOutput
from hf_paged.session import Session

if TYPE_CHECKING:
    from hf_paged.integration.batching_manager import PagedBatchingManager

logger = logging.getLogger(__name__)


class BatchingWorker:
    """The loop over one engine. Requests whose tokens are looked at one by one have a session that streams."""

    def __init__(self, manager: PagedBatchingManager, engine: Engine) -> None:
        self._manager = manager
        self._board = manager.board
        self._engine = engine
        self._device = manager.model.device
        self._running: dict[str, BatchedRequest] = {}  # by the engine's id

    def run(self) -> None:
        """Until the manager says that it is over, or something breaks: then every open request fails with it."""
        error: BaseException | None = None
        try:
            with self._engine.session(stream=True, text=False) as streams, self._engine.session(text=False) as others:
                while self._manager.wait_for_work(self._settle):
                    arrivals, cancelled = self._board.take_news()
                    self._abort(cancelled)
                    self._admit(arrivals, streams, others)
                    self._step(streams)
                    self._step(others)
                self._abort(list(self._running.values()))
                for session in (streams, others):
                    self._collect(session.advance() if session.unfinished() else [])
        except BaseException as raised:
            error = raised
            logger.error("hf_paged: continuous batching ended by %r", raised, exc_info=raised)
        finally:
            self._manager.end(error)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _admit(self, arrivals: list[BatchedRequest], streams: Session, others: Session) -> None:
        """Give the engine what it can run; the rest ends here, each with its own error."""
        refused: list[tuple[BatchedRequest, GenerationOutput]] = []
        reason = self._engine.unsupported_reason() if arrivals else None
        for request in arrivals:
            try:
                if reason is not None:
                    raise ValueError(f"the model cannot run on the paged engine as it is now: {reason}")
                prompt = self._engine.check_prompt(request.prompt)
                settings = request_settings(self._engine, request)
                session = streams if request.needs_tokens else others
                engine_id = session.add(prompt, settings, seed=request.seed)
            except Exception as error:
                refused.append((request, request.finish(Refused(error))))
            else:
                request.start()
                self._running[engine_id] = request
        self._board.deliver(refused)

    def _abort(self, requests: list[BatchedRequest]) -> None:
        ids = {id(request) for request in requests}
        for engine_id in [key for key, request in self._running.items() if id(request) in ids]:
            try:
                self._engine.abort(engine_id)
            except KeyError:
                continue  # it ended meanwhile: its completion is on the way

    def _step(self, session: Session) -> None:
        if session.unfinished():
            self._collect(session.advance())
        if self._running and not session.unfinished():
            self._fail_lost(session)

    def _collect(self, outputs: list[StepOutput]) -> None:
        delivered: list[tuple[BatchedRequest, GenerationOutput]] = []
        for output in outputs:
            request = self._running[output.request_id]
            if output.new_token_ids:
                request.extend(output.new_token_ids, output.new_logprobs)
            if output.completion is not None:
                del self._running[output.request_id]
                delivered.append((request, request.finish(_error(request, output))))
            elif request.streaming:
                delivered.append((request, request.output()))
        if delivered:
            self._board.deliver(delivered)

    def _fail_lost(self, session: Session) -> None:
        """`disable` ends requests without a word to their callers."""
        lost = [key for key, request in self._running.items() if request.needs_tokens == session.stream]
        failed = [self._running.pop(key) for key in lost]
        error = "the model was disabled, or enabled anew, while this request ran"
        self._board.deliver([(request, request.finish(error)) for request in failed])


def _error(request: BatchedRequest, output: StepOutput) -> str | None:
    assert output.completion is not None
    if output.finish_reason == "error":
        return output.completion.error
    if output.finish_reason == "abort":
        return "the manager was stopped before this request was done"
    if output.finish_reason == "length" and request.is_cut:
        return NoRoom(f"stopped after {len(request.tokens)} new tokens: the model or the KV pool has no room for more")
    return None
