"""HTTP requests in the batching manager, or by `model.generate` if they are not native."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.engine.features.grammars import BARRED
from hf_paged.integration.continuous_batching.manager import PagedBatchingManager, RequestOverrides, requests_with
from hf_paged.integration.continuous_batching.requests import BatchedRequest, NoRoom, Refused
from hf_paged.integration.stock_pieces import CallEndedError
from hf_paged.sampling.sampler import derive_seed
from hf_paged.server.calls import GeneratesFor, RefusedRequestError, ServedCall

# The default of a body's max_tokens. A request with more new tokens than there is room for runs by `model.generate`,
# which goes past the model's positions, if the room is below this; otherwise the request ends there as "length".
LEAST_ROOM = 1024


class ServedRequests:
    """A substitute of the batching manager, to which transformers' server code adds one request.

    Args:
        manager: the manager of all requests; None if the server runs them by `model.generate`.
        thread: transformers' thread for `model.generate`.
        config: the request's settings; ``max_new_tokens`` becomes the number of tokens of a request that was cut.
        settings: the settings for the engine; None if they are not native.
        inputs: inputs of `model.generate` on the model's device; None for the prompt's tokens alone.
        index: index of the answer's choice.
    """

    def __init__(self, manager: PagedBatchingManager | None, thread: Any, model: Any, processor: Any,
                 config: GenerationConfig, settings: GenerationConfig | None, inputs: dict[str, Any] | None = None,
                 index: int = 0) -> None:
        self.call = ServedCall.current()
        self._manager = manager
        self._thread = thread
        self._model = model
        self._processor = processor
        self._config = config
        self._settings = settings
        self._inputs = inputs
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._callback: Callable[[GenerationOutput], None] | None = None
        self._request: BatchedRequest | None = None

    @property
    def background_thread_status(self) -> Any:
        assert self._manager is not None
        return self._manager.background_thread_status

    def is_dead(self) -> bool:
        """Return whether an error ended the manager's thread."""
        return self._manager is not None and self._manager.background_thread_status.fatal_error is not None

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool = False, **lengths: Any) -> str:
        """Queue the one request, as `PagedBatchingManager.add_request` does."""
        from transformers.cli.serving.utils import CBWorkerDeadError

        self._request = BatchedRequest(request_id, list(input_ids), streaming=streaming)
        manager, wishes = self._manager, self.call.wishes
        if manager is None or self._settings is None:
            self._check_for_running_alone()
            self._run_alone()
            return request_id
        seed = None if wishes.seed is None else derive_seed(wishes.seed, self._index)
        own = RequestOverrides(self._settings, LEAST_ROOM, getattr(self._processor, "tokenizer", self._processor), seed,
                  wishes.options(), self.call.form)
        with requests_with(own):
            made = manager.add_request(input_ids, request_id, streaming=streaming, cache_salt=self.call.cache_salt,
                                       adapter_name=self.call.adapter_name, **lengths)
        if made is None:
            raise CBWorkerDeadError(f"the batching manager is stopping and cannot accept request {request_id}")
        self.call.at_end(lambda: manager.cancel_request(request_id))
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Register a callback as `PagedBatchingManager.register_result_handler`, also for `model.generate`."""
        self._callback = callback
        if self._manager is not None and self._settings is not None:
            self._manager.register_result_handler(request_id, self._receive)

    def cancel_request(self, request_id: str) -> None:
        """End the HTTP request and all its requests."""
        self.call.end()

    def _receive(self, output: GenerationOutput) -> None:
        if isinstance(output.error, Refused):
            try:
                self._check_for_running_alone()
            except RefusedRequestError as error:
                self.call.refuse(f"{error} ({output.error})")
            else:
                self._run_alone()
                return
        elif isinstance(output.error, str) and BARRED in output.error:
            self.call.refuse(output.error)
        if isinstance(output.error, NoRoom):
            output.error, output.status = None, RequestStatus.FINISHED
            self._config.max_new_tokens = len(output.generated_tokens)
        self.call.begin()
        self._deliver(output)

    def _deliver(self, output: GenerationOutput) -> None:
        assert self._callback is not None  # the server's code registers it before the event loop runs again
        if not self.call.over.is_set():
            self._callback(output)

    def _check_for_running_alone(self) -> None:
        if (name := self.call.wishes.of_the_batch()) is not None:
            raise RefusedRequestError(f"{name}: expected it left out, since only requests that run in the batch have "
                                      "it (--continuous-batching), and this one cannot")

    def _run_alone(self) -> None:
        self._thread.submit(self._generate)

    def _generate(self) -> None:
        """Run the request by `model.generate` in transformers' thread, and send its outputs."""
        request = self._request
        assert request is not None
        config, inputs = copy.deepcopy(self._config), self._inputs
        if inputs is None:
            ids = torch.tensor([request.prompt], dtype=torch.int64, device=self._model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            config.use_cache = True  # the server has set it to False for continuous batching
        tokens = _Tokens(request, self._send) if request.streaming else None
        error = None
        try:
            made = GeneratesFor(self._model, self.call, self._index).generate(
                **inputs, generation_config=config, streamer=tokens, tokenizer=self._processor)
            request.tokens = made[0, inputs["input_ids"].shape[1] :].tolist()
        except CallEndedError:
            return
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}" if self.call.refusal is None else self.call.refusal
        self._send(request.finish(error))

    def _send(self, output: GenerationOutput) -> None:
        self._loop.call_soon_threadsafe(self._deliver, output)


class _Tokens:
    """A streamer that skips the prompt, and sends an output with all tokens so far for each new token."""

    def __init__(self, request: BatchedRequest, send: Callable[[GenerationOutput], None]) -> None:
        self._request = request
        self._send = send
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._request.extend(value.flatten().tolist(), None)  # several tokens if drafts were accepted
            self._send(self._request.output())
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: `_generate` sends the last output."""
