"""One HTTP request in the batching manager; by `model.generate` where the engine does not take it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.integration.continuous_batching.manager import PagedBatchingManager, request_config
from hf_paged.integration.continuous_batching.requests import BatchedRequest, NoRoom, Refused
from hf_paged.integration.serving.calls import GeneratesFor, ServedCall
from hf_paged.integration.stock_pieces import CallEndedError

# The server's own length where a body says none. With less room than this, a request that wants more than there is runs
# by `model.generate`, which goes past the model's positions; with more room it ends there, as of "length".
LEAST_ROOM = 1024


class ServedRequests:
    """Stands for the batching manager while the server's own code makes one request of it.

    Args:
        manager: the manager of all requests.
        thread: transformers' thread for `model.generate`.
        config: the request's settings; ``max_new_tokens`` is set to what it got where that was cut.
        settings: what the engine is told of them; None: the engine does not carry them out.
    """

    def __init__(self, manager: PagedBatchingManager, thread: Any, model: Any, processor: Any, config: GenerationConfig,
                 settings: GenerationConfig | None) -> None:
        self.call = ServedCall.current()
        self._manager = manager
        self._thread = thread
        self._model = model
        self._processor = processor
        self._config = config
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[GenerationOutput], None] | None = None
        self._request: BatchedRequest | None = None

    @property
    def background_thread_status(self) -> Any:
        return self._manager.background_thread_status

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool = False, **lengths: Any) -> str:
        """Queue the one request; as `PagedBatchingManager.add_request`."""
        from transformers.cli.serving.utils import CBWorkerDeadError

        self._request = BatchedRequest(request_id, list(input_ids), streaming=streaming)
        if self._settings is None:
            self._run_alone()
            return request_id
        with request_config(self._settings, LEAST_ROOM):
            made = self._manager.add_request(input_ids, request_id, streaming=streaming,
                                             cache_salt=self.call.cache_salt, **lengths)
        if made is None:
            raise CBWorkerDeadError(f"the batching manager is stopping and cannot accept request {request_id}")
        self.call.at_end(lambda: self._manager.cancel_request(request_id))
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """As `PagedBatchingManager.register_result_handler`, for outputs of `model.generate`, too."""
        self._callback = callback
        if self._settings is not None:
            self._manager.register_result_handler(request_id, self._receive)

    def cancel_request(self, request_id: str) -> None:
        """The one request ends."""
        self.call.end()

    def _receive(self, output: GenerationOutput) -> None:
        if isinstance(output.error, Refused):
            self._run_alone()
            return
        if isinstance(output.error, NoRoom):
            output.error, output.status = None, RequestStatus.FINISHED
            self._config.max_new_tokens = len(output.generated_tokens)
        self.call.begin()
        self._deliver(output)

    def _deliver(self, output: GenerationOutput) -> None:
        assert self._callback is not None  # the server's code registers it before the event loop runs again
        if not self.call.over.is_set():
            self._callback(output)

    def _run_alone(self) -> None:
        self._thread.submit(self._generate)

    def _generate(self) -> None:
        """In the thread: what `model.generate` makes of the request, as outputs of it."""
        request = self._request
        assert request is not None
        ids = torch.tensor([request.prompt], dtype=torch.int64, device=self._model.device)
        config = copy.deepcopy(self._config)
        config.use_cache = True  # the server turned it off, since continuous batching keeps a cache of its own
        tokens = _Tokens(request, self._send) if request.streaming else None
        error = None
        try:
            made = GeneratesFor(self._model, self.call).generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=tokens,
                tokenizer=self._processor,
            )
            request.tokens = made[0, ids.shape[1] :].tolist()
        except CallEndedError:
            return
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}" if self.call.refusal is None else self.call.refusal
        self._send(request.finish(error))

    def _send(self, output: GenerationOutput) -> None:
        self._loop.call_soon_threadsafe(self._deliver, output)


class _Tokens:
    """A streamer: the prompt, which it leaves out, then every token as an output of the request so far."""

    def __init__(self, request: BatchedRequest, send: Callable[[GenerationOutput], None]) -> None:
        self._request = request
        self._send = send
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._request.extend(value.tolist(), None)
            self._send(self._request.output())
        self._is_prompt = False

    def end(self) -> None:
        """The last output follows when `generate` has returned."""
