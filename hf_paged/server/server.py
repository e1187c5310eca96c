"""`transformers serve` over the engine, with settings, cancellation and errors per request.

transformers' manager of continuous batching takes its settings from the first request; later requests change only
length and EOS ids. Here the manager starts with the model's settings, and each request has the settings of its body
(`fields.py`). A request that the engine does not support (beams) or accept (a prompt that is too long) runs by
`model.generate`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import sys
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
from hf_paged.parallel.checkpoint_place import check_place
from hf_paged.server.adapters import checking_pin, listing, loading, refuse_adapter, resolving
from hf_paged.server.answers import Answer
from hf_paged.server.calls import CURRENT, GeneratesFor, RefusedRequestError, ServedCall, tokens_only
from hf_paged.server.ending import OpenAnswers, ending_server
from hf_paged.server.errors import reading_error, settings_of
from hf_paged.server.fields import CHAT, RESPONSES, TEXT, read_body
from hf_paged.server.forms import compiled_form
from hf_paged.server.requests import ServedRequests
from hf_paged.server.templates import check_for_model, check_length, check_parts

_replaced: list[tuple[Any, str, Any]] = []  # (owner, name, original attribute)


def install_serving(adapters: dict[str, str] | None = None) -> None:
    """Replace the parts of transformers' server that create, run and answer requests; later calls have no effect.

    Requires `transformers[serving]`.

    Args:
        adapters: Paths by name of LoRA adapters to load with the model that the server is pinned to.
    """
    if _replaced:
        return
    import uvicorn
    from transformers.cli.serving import server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager

    answers = OpenAnswers()
    _replace(server, "build_server", functools.partial(_building, answers))
    _replaced.append((uvicorn, "Server", uvicorn.Server))
    setattr(uvicorn, "Server", ending_server(uvicorn.Server, answers))  # noqa: B010  # mypy takes it for a type
    _replace(ModelManager, "_validate_args", functools.partial(checking_pin, adapters or {}))
    _replace(ModelManager, "_validate_args", _checking_place)
    _replace(ModelManager, "_load_model", functools.partial(loading, adapters or {}))
    lists = "list_models" if hasattr(ModelManager, "list_models") else "get_gen_models"  # the name in 5.23
    of_class = vars(ModelManager)[lists]  # may be a static method; the replacement needs the manager
    _replaced.append((ModelManager, lists, of_class))
    setattr(ModelManager, lists, functools.wraps(getattr(of_class, "__func__", of_class))(listing(of_class)))
    for handler, endpoint in ((ChatCompletionHandler, CHAT), (CompletionHandler, TEXT), (ResponseHandler, RESPONSES)):
        _replace(handler, "handle_request", functools.partial(_answering, endpoint))
        _replace(handler, "_validate_request", lambda stock: lambda self, body: None)  # `read_body` has checked it
        _replace(handler, "_build_generation_config", _configuring)
        _replace(handler, "_resolve_model", resolving)
    for handler, whole, stream in ((ChatCompletionHandler, _whole_chat, _chat_stream),
                                   (CompletionHandler, _whole_text, _text_stream)):
        _replace(handler, "_non_streaming", functools.partial(_whole, whole))
        _replace(handler, "_streaming", functools.partial(_stream, stream))
    for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        for name in ("_non_streaming", "_streaming"):
            _replace(handler, name, _checking)
    _replace(BaseHandler, "get_processor_inputs_from_messages", _reading_parts)
    _replace(CBGenerateManager, "init_cb", _starting)
    _replace(CBGenerateManager, "generate_streaming", _streaming_in_a_batch)
    _replace(CBGenerateManager, "generate_non_streaming", _answering_in_a_batch)
    _replace(GenerateManager, "generate_streaming", _streaming_alone)
    _replace(GenerateManager, "generate_non_streaming", _answering_alone)


def _replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    stock, stored = getattr(owner, name), inspect.getattr_static(owner, name)
    made = functools.wraps(stock)(make(stock))
    setattr(owner, name, staticmethod(made) if isinstance(stored, staticmethod) else made)
    _replaced.append((owner, name, stored))


def _checking_place(stock: Callable) -> Callable:
    """Wrap `ModelManager._validate_args`: a missing model folder ends the command with a one-line error."""

    def _validate_args(self: Any) -> None:
        stock(self)
        if self.force_model is not None and not self.force_model.endswith(".gguf"):
            try:
                check_place("MODEL", self.force_model)
            except OSError as error:
                print(error, file=sys.stderr)
                sys.exit(2)

    return _validate_args


def _building(answers: OpenAnswers, stock: Callable) -> Callable:
    def build_server(*args: Any, **kwargs: Any) -> Any:
        from hf_paged.server.http import add_middleware

        app = stock(*args, **kwargs)
        add_middleware(app, answers)
        return app

    return build_server


def _answering(endpoint: str, stock: Callable) -> Callable:
    async def handle_request(self: Any, body: dict, *args: Any, **kwargs: Any) -> Any:
        from fastapi import HTTPException

        call = ServedCall.current()
        call.settings = settings_of(body)
        try:
            call.wishes = read_body(endpoint, body)
            _check_fields(body)
            answer = await stock(self, call.wishes.for_transformers(), *args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer  # a stream is wrapped by `_checking`
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


def _check_fields(body: dict) -> None:
    """Check `suffix`, whose type transformers checks only after generation."""
    from pydantic import TypeAdapter

    TypeAdapter(str | None).validate_python(body.get("suffix"))


def _reading_parts(stock: Callable) -> Callable:
    def get_processor_inputs_from_messages(messages: Any, modality: Any) -> Any:
        check_parts(messages, modality.name)
        return stock(messages, modality)

    return get_processor_inputs_from_messages


def _configuring(stock: Callable) -> Callable:
    def _build_generation_config(self: Any, body: dict, of_model: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        config = stock(self, body, of_model, *args, **kwargs)
        ServedCall.current().wishes.apply(config, of_model)
        return config

    return _build_generation_config


def _whole(answer: Callable, stock: Callable) -> Callable:
    arguments = inspect.signature(stock)

    async def _non_streaming(self: Any, *args: Any, **kwargs: Any) -> Any:
        from fastapi.responses import JSONResponse

        given = arguments.bind(self, *args, **kwargs).arguments
        if _is_stocks(given["gen_manager"]):
            return await stock(self, *args, **kwargs)
        return JSONResponse(await answer(_answer(given), given), media_type="application/json")

    return _non_streaming


def _stream(answer: Callable, stock: Callable) -> Callable:
    arguments = inspect.signature(stock)

    def _streaming(self: Any, *args: Any, **kwargs: Any) -> Any:
        from fastapi.responses import StreamingResponse

        given = arguments.bind(self, *args, **kwargs).arguments
        if _is_stocks(given["gen_manager"]):
            return stock(self, *args, **kwargs)
        return StreamingResponse(answer(_answer(given), given), media_type="text/event-stream")

    return _streaming


def _whole_chat(answer: Answer, given: dict[str, Any]) -> Any:
    return answer.whole_chat()


def _chat_stream(answer: Answer, given: dict[str, Any]) -> Any:
    return answer.chat_stream()


def _whole_text(answer: Answer, given: dict[str, Any]) -> Any:
    return answer.whole_text(given.get("suffix") or "")


def _text_stream(answer: Answer, given: dict[str, Any]) -> Any:
    return answer.text_stream(given.get("suffix") or "")


def _answer(given: dict[str, Any]) -> Answer:
    """Make an `Answer` from the arguments of transformers' `_non_streaming` and `_streaming`."""
    manager, model, processor = given["gen_manager"], given["model"], given["processor"]
    wishes = ServedCall.current().wishes
    manager._check_alive(given["request_id"]) if hasattr(manager, "_check_alive") else None

    def request(index: int, config: GenerationConfig) -> ServedRequests:
        return _requests(manager, model, processor, config, given["inputs"], index)

    model_id = ServedCall.current().adapter_name or given["model_id"]
    return Answer(given["request_id"], model_id, model, processor, given["inputs"], given["gen_config"], request,
                  wishes.tools if wishes.has_tools else None)


def _checking(stock: Callable) -> Callable:
    """Wrap `_non_streaming` and `_streaming`: first run the checks that need the model, without blocking others."""
    arguments = inspect.signature(stock)

    async def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, call = arguments.bind(self, *args, **kwargs).arguments, ServedCall.current()
        model, processor = given["model"], given["processor"]
        check_for_model(call.wishes, processor, model, getattr(self, "chat_template_kwargs", None))
        check_length(model, given["inputs"])
        call.form = await compiled_form(call.wishes, model, getattr(processor, "tokenizer", processor))
        answer = stock(self, *args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    return checked


def _starting(stock: Callable) -> Callable:
    def init_cb(self: Any, model: Any, gen_config: GenerationConfig) -> None:
        enable_once(model)
        if (call := CURRENT.get()) is not None:
            call.on_enabled()
        base = tokens_only(model.generation_config)
        batching = self._cb_config or ContinuousBatchingConfig()
        stock(self, model, base if _is_native(model, base, batching) else gen_config)

    return init_cb


def _streaming_in_a_batch(stock: Callable) -> Callable:
    def generate_streaming(self: Any, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig,
                           request_id: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._cb, PagedBatchingManager):
            refuse_adapter()
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
            refuse_adapter()
            return await stock(self, model, processor, inputs, gen_config, request_id, *args, **kwargs)
        requests = _requests(self, model, processor, gen_config)
        try:
            return await stock(_with(self, requests), model, processor, inputs, gen_config, _unique(request_id), *args,
                               **kwargs)
        except RuntimeError as error:  # stock raises it for a failed output
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
        # Shielded: the thread sets the result, which would raise on a future cancelled by a disconnect.
        return await asyncio.shield(running)

    return generate_non_streaming


def _requests(manager: Any, model: Any, processor: Any, config: GenerationConfig, inputs: Any = None,
              index: int = 0) -> ServedRequests:
    """Make the request of one choice.

    Args:
        manager: The server's manager, for continuous batching or for `model.generate`.
        inputs: As in `ServedRequests`; continuous batching ignores them.
    """
    from transformers.cli.serving.utils import GenerateManager, InferenceThread

    if isinstance(manager, GenerateManager):
        inputs = {**inputs, **({"generation_mode": "text"} if hasattr(model, "has_talker") else {})}
        return ServedRequests(None, manager._thread, model, processor, config, None, inputs, index)
    if not hasattr(manager, "_hf_paged_thread"):
        manager._hf_paged_thread = InferenceThread()
    settings, told = None, tokens_only(config)
    tokenizer = getattr(processor, "tokenizer", processor)
    if _is_native(model, told, manager._cb.continuous_batching_config, tokenizer):
        with suppress(ValueError, TypeError):  # `model.generate` raises its own error for invalid settings
            # One sequence per request: each choice is a request of its own.
            settings = batching_config(model, told, {"num_return_sequences": None})
    return ServedRequests(manager._cb, manager._hf_paged_thread, model, processor, config, settings, index=index)


def _is_stocks(manager: Any) -> bool:
    """Return whether transformers' own continuous batching serves the model, which hf_paged does not support.

    Raises:
        RefusedRequestError: If the request needs other settings than the manager's.
    """
    from transformers.cli.serving.utils import CBGenerateManager

    if not isinstance(manager, CBGenerateManager) or isinstance(manager._cb, PagedBatchingManager):
        return False
    assert manager._cb is not None  # `init_cb` made it
    refuse_adapter()
    if odd := ServedCall.current().wishes.beyond(manager._cb.generation_config):
        raise RefusedRequestError(f"{odd}: expected it left out, since transformers' own continuous batching runs this "
                                  "model, with one set of settings for all requests")
    return True


def _with(manager: Any, requests: ServedRequests) -> SimpleNamespace:
    """Return a stand-in for the server's manager, through which transformers' code makes one request of `requests`."""
    return SimpleNamespace(_cb=requests, _check_alive=manager._check_alive)


def _unique(request_id: str) -> str:
    """Append a random suffix: clients may choose request ids, which must not collide."""
    return f"{request_id}-{uuid.uuid4().hex}"


def _is_native(model: Any, config: GenerationConfig, batching: ContinuousBatchingConfig, tokenizer: Any = None) -> bool:
    if not is_enabled(model):
        return False
    return stock_reason(get_engine(model), batching_config(model, config, {}), batching, tokenizer) is None
