"""`transformers serve` over the engine, where every request keeps its own settings, its own end and its own errors.

transformers' manager of continuous batching is made with the first request's settings, and later requests bring but a
length and EOS ids. Here it starts from the model's settings, and each request brings what its body asked for. One that
the engine does not carry out (`stop`), or does not take (a prompt that is too long), runs by `model.generate`.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_paged.integration.continuous_batching.manager import PagedBatchingManager
from hf_paged.integration.continuous_batching.requests import batching_config, stock_reason
from hf_paged.integration.enable import get_engine, is_enabled
from hf_paged.integration.install import enable_once
from hf_paged.integration.serving.calls import GeneratesFor, RefusedRequestError, ServedCall, tokens_only
from hf_paged.integration.serving.errors import reading_error, settings_of
from hf_paged.integration.serving.requests import ServedRequests

_replaced: list[tuple[Any, str, Callable]] = []  # owner, name and what stood there


def install_serving() -> None:
    """Replace what of transformers' server makes, runs and answers requests; once is enough. Needs
    `transformers[serving]`."""
    if _replaced:
        return
    from transformers.cli.serving import server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    _replace(server, "build_server", _building)
    for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        _replace(handler, "handle_request", _answering)
    _replace(CBGenerateManager, "init_cb", _starting)
    _replace(CBGenerateManager, "generate_streaming", _streaming_in_a_batch)
    _replace(CBGenerateManager, "generate_non_streaming", _answering_in_a_batch)
    _replace(GenerateManager, "generate_streaming", _streaming_alone)
    _replace(GenerateManager, "generate_non_streaming", _answering_alone)


def _replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(make(stock)))
    _replaced.append((owner, name, stock))


def _building(stock: Callable) -> Callable:
    def build_server(*args: Any, **kwargs: Any) -> Any:
        from hf_paged.integration.serving.http import furnish

        app = stock(*args, **kwargs)
        furnish(app)
        return app

    return build_server


def _answering(stock: Callable) -> Callable:
    async def handle_request(self: Any, body: dict, *args: Any, **kwargs: Any) -> Any:
        from fastapi import HTTPException

        call = ServedCall.current()
        call.settings = settings_of(body)
        try:
            _check_fields(body, self._unused_fields)
            return await stock(self, body, *args, **kwargs)
        except HTTPException:
            raise
        except RefusedRequestError as error:
            raise HTTPException(400, str(error)) from error
        except queue.Full as error:
            raise HTTPException(503, "too many requests wait to be run") from error
        except Exception as error:
            if (reason := reading_error(error, call.settings)) is None:
                raise
            raise HTTPException(400, reason) from error

    return handle_request


def _check_fields(body: dict, unused: set[str]) -> None:
    """Fields that transformers looks at only when the answer has been generated."""
    from pydantic import TypeAdapter

    kinds: tuple[tuple[str, Any], ...] = (("suffix", str | None), ("parallel_tool_calls", bool))
    for name, kind in kinds:
        if name in body and name not in unused:
            TypeAdapter(kind).validate_python(body[name])


def _starting(stock: Callable) -> Callable:
    def init_cb(self: Any, model: Any, gen_config: GenerationConfig) -> None:
        enable_once(model)
        base = tokens_only(model.generation_config)
        batching = self._cb_config or ContinuousBatchingConfig()
        stock(self, model, base if _is_native(model, base, batching) else gen_config)

    return init_cb


def _streaming_in_a_batch(stock: Callable) -> Callable:
    def generate_streaming(self: Any, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig,
                           request_id: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._cb, PagedBatchingManager):
            return stock(self, model, processor, inputs, gen_config, request_id, *args, **kwargs)
        requests = _requests(self, model, processor, gen_config)
        result = stock(_with(self, requests), model, processor, inputs, gen_config, _unique(request_id), *args,
                       **kwargs)
        requests.call.streams = True
        return result

    return generate_streaming


def _answering_in_a_batch(stock: Callable) -> Callable:
    async def generate_non_streaming(self: Any, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig,
                                     request_id: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._cb, PagedBatchingManager):
            return await stock(self, model, processor, inputs, gen_config, request_id, *args, **kwargs)
        requests = _requests(self, model, processor, gen_config)
        try:
            return await stock(_with(self, requests), model, processor, inputs, gen_config, _unique(request_id), *args,
                               **kwargs)
        except RuntimeError as error:  # what stock makes of a failed output
            if requests.call.refusal is None:
                raise
            raise RefusedRequestError(requests.call.refusal) from error

    return generate_non_streaming


def _streaming_alone(stock: Callable) -> Callable:
    def generate_streaming(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        call = ServedCall.current()
        result = stock(self, GeneratesFor(model, call), *args, **kwargs)
        call.streams = True
        return result

    return generate_streaming


def _answering_alone(stock: Callable) -> Callable:
    async def generate_non_streaming(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        running = asyncio.ensure_future(stock(self, GeneratesFor(model, ServedCall.current()), *args, **kwargs))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        # The thread sets a result that must find its future as it was, also when the client has left.
        return await asyncio.shield(running)

    return generate_non_streaming


def _requests(manager: Any, model: Any, processor: Any, config: GenerationConfig) -> ServedRequests:
    from transformers.cli.serving.utils import InferenceThread

    if not hasattr(manager, "_hf_paged_thread"):
        manager._hf_paged_thread = InferenceThread()
    settings, told = None, tokens_only(config)
    if _is_native(model, told, manager._cb.continuous_batching_config):
        with suppress(ValueError, TypeError):  # `model.generate` raises its own error for them
            # The server returns one sequence, whatever the settings say.
            settings = batching_config(model, told, {"num_return_sequences": None})
    return ServedRequests(manager._cb, manager._hf_paged_thread, model, processor, config, settings)


def _with(manager: Any, requests: ServedRequests) -> SimpleNamespace:
    """What stands for a manager of the server while its own code makes one request of `requests`."""
    return SimpleNamespace(_cb=requests, _check_alive=manager._check_alive)


def _unique(request_id: str) -> str:
    """Clients may choose ids of their requests; they must not meet another's."""
    return f"{request_id}-{uuid.uuid4().hex}"


def _is_native(model: Any, config: GenerationConfig, batching: ContinuousBatchingConfig) -> bool:
    if not is_enabled(model):
        return False
    return stock_reason(get_engine(model), batching_config(model, config, {}), batching) is None
