"""The application: the endpoints of the OpenAI API over one model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import Response
from transformers.cli.serving.utils import get_response_template

from hf_paged.integration.enabled import ENGINES
from hf_paged.observe.registry import metrics_of
from hf_paged.optional import lacking
from hf_paged.options.processors import Prompt
from hf_paged.server.choices import is_parsed
from hf_paged.server.completions import Answer, ChatAnswer, TextAnswer
from hf_paged.server.errors import (
    EngineDeadError,
    FailedRequestError,
    RefusedRequestError,
    error_body,
    failure,
    settings_of,
)
from hf_paged.server.generation import Generation
from hf_paged.server.lifetime import MAX_BODY_BYTES, EndsWithItsClient, OpenAnswers
from hf_paged.server.prompts import chat_prompt, check_tokens, text_prompt
from hf_paged.server.protocol import (
    B,
    ChatBody,
    ConversationBody,
    RequestBody,
    ResponsesBody,
    TextBody,
    read_body,
)
from hf_paged.server.responses import ResponsesAnswer
from hf_paged.server.served_model import ServedModel
from hf_paged.server.structured import compiled_form
from hf_paged.server.tools import calls_form

REQUEST_ID = "x-request-id"


def build_app(served: ServedModel, answers: OpenAnswers, *, enable_cors: bool = False,
              max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Return the application of a model, which it closes when it shuts down.

    Args:
        answers: registry of running answers, which end when the server stops.
        enable_cors: let pages of any origin send requests.
        max_body_bytes: longer bodies are refused.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.close()

    app = FastAPI(lifespan=lifespan, title="hf_paged")
    app.add_middleware(EndsWithItsClient, answers=answers, max_body_bytes=max_body_bytes)
    if enable_cors:  # around the other one, whose refusals pages read, too
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    _add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict[str, Any]) -> Response:
        """Answer a chat."""
        return await _answered(served, request, ChatBody, ChatAnswer, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict[str, Any]) -> Response:
        """Continue texts."""
        return await _answered(served, request, TextBody, TextAnswer, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: dict[str, Any]) -> Response:
        """Answer a chat of the Responses API."""
        return await _answered(served, request, ResponsesBody, ResponsesAnswer, body)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the names of the model and its adapters."""
        return {"object": "list", "data": served.listed()}

    @app.get("/health")
    def health() -> JSONResponse:
        """Say whether requests can be answered."""
        if not served.is_alive:
            return JSONResponse({"status": "unhealthy", "reason": "the thread that generates has ended"}, 503)
        if (reason := served.why_not_ready) is not None:
            return JSONResponse({"status": "starting", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    app.add_api_route("/metrics", metrics_endpoint(), methods=["GET"], response_class=Response)
    return app


async def _answered(served: ServedModel, request: Request, kind: type[B], answer_class: type[Answer],
                    given: dict[str, Any]) -> Response:
    """Return the answer to a body.

    Raises:
        RefusedRequestError: the body cannot be carried out.
        FailedRequestError, EngineDeadError: generation failed.
    """
    request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
    body = read_body(kind, given)
    adapter = served.adapter_of(body.model)
    check_tokens(served, body)
    prompts = await asyncio.get_running_loop().run_in_executor(served.reader, _prompts, served, body)
    config = body.config(served.model.generation_config)
    count, form_field = body.num_choices(config), body.form
    if isinstance(body, ConversationBody) and (must_call := body.tool_choice.must_call) is not None:
        template = get_response_template(served.processor, served.model)
        form_field = "tools", calls_form(body.tools, must_call, body.parallel_tool_calls, template)
    form = await compiled_form(form_field, served.engine, served.tokenizer)
    skips_special = not (isinstance(body, ConversationBody) and is_parsed(served))
    generations = [Generation(served, request.state.exchange, body, prompt, config, count, number * count, adapter,
                              form, skips_special, settings_of(given)) for number, prompt in enumerate(prompts)]
    answer = answer_class(request_id, adapter or served.names[0], body, generations)
    headers = {REQUEST_ID: request_id}
    if body.stream:
        return StreamingResponse(await answer.streamed(), media_type="text/event-stream", headers=headers)
    return JSONResponse(await answer.whole(), headers=headers)


def _prompts(served: ServedModel, body: RequestBody) -> list[Prompt]:
    if isinstance(body, TextBody):
        return [text_prompt(served, text) for text in body.prompt]
    assert isinstance(body, (ChatBody, ResponsesBody))
    return [chat_prompt(served, body)]


def metrics_endpoint() -> Callable[[], Response]:
    """Return a function that answers with the metrics of every engine of the process, those made now from now on."""
    if find_spec("prometheus_client") is None:
        return lambda: JSONResponse(error_body(lacking("metrics", "/metrics"), 501), 501)
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()

    def watch() -> None:
        with suppress(RuntimeError):  # a model was enabled during the copy; the next call registers it
            for engine in list(ENGINES.values()):
                metrics_of(engine, registry)

    def answer() -> Response:
        """Answer in Prometheus's text format; waits for running steps.

        OpenMetrics is not offered: prometheus_client (0.26) writes `hf_paged_` for `hf_paged:` there, in samples only.
        """
        watch()
        return Response(generate_latest(registry), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    watch()
    return answer


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RefusedRequestError)
    @app.exception_handler(EngineDeadError)
    @app.exception_handler(FailedRequestError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(*failure(error))

    @app.exception_handler(AnyHTTPException)
    async def with_status(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input, which FastAPI would include: it may hold NaN, which JSON cannot.
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return JSONResponse(error_body(f"{found} (expected a JSON object)", 422), 422)
