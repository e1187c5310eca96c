"""Errors of the server as bodies and events, and the attribution of an exception to the request (400) or the server."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.generation

from hf_paged.engine.features import stop_rules
from hf_paged.errors import FallbackError, UnsupportedOptionError
from hf_paged.options import arguments, table
from hf_paged.options import settings as settings_module

logger = logging.getLogger(__name__)
DONE = "data: [DONE]\n\n"  # the last event of a stream
MAX_LENGTH = 1000  # characters of an error message
# Body fields that make a request's GenerationConfig.
_SETTINGS = ("generation_config", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens",
             "max_output_tokens", "frequency_penalty", "logit_bias", "stop")
_OUT_OF_LUCK = (MemoryError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError)
_WRONG_VALUE = (ValueError, TypeError, KeyError, AttributeError, LookupError, ArithmeticError, NotImplementedError,
                RecursionError)

_OURS = Path(__file__).parents[1]
_TRANSFORMERS = Path(transformers.__file__).parent
_STOCK_GENERATION = _TRANSFORMERS / "generation"
# Files that only read a request's settings, or only apply one of them.
_OF_SETTINGS = {
    *(_STOCK_GENERATION / f"{name}.py" for name in
      ("configuration_utils", "logits_process", "stopping_criteria", "watermarking")),
    *(Path(str(module.__file__)) for module in
      (settings_module, table, arguments, stop_rules)),
}
_DECODING = ("_sample", "_beam_search", "_assisted_decoding", "_prefill")


class RefusedRequestError(ValueError):
    """An error of a request that cannot run; the message is for its client."""


class FailedRequestError(RuntimeError):
    """Generation failed, for a reason that the client cannot change."""


class EngineDeadError(RuntimeError):
    """The thread that generates has ended; the server cannot answer until it is started anew."""


def refusal(name: str, value: Any, expected: str) -> RefusedRequestError:
    """Return the error for a value of a body field."""
    return RefusedRequestError(f"{name}={value!r:.200}: {expected}")


@contextmanager
def blaming(expected: str) -> Iterator[None]:
    """Raise RefusedRequestError for an exception of the block, except where memory or a package is missing.

    ``expected`` names the fields that the block reads, and what is accepted.
    """
    try:
        yield
    except (RefusedRequestError, *_OUT_OF_LUCK):
        raise
    except Exception as error:
        raise RefusedRequestError(_reason(expected, error)) from error


def settings_of(body: dict[str, Any]) -> str:
    """Format the generation settings of a request for an error message."""
    settings = ", ".join(f"{name}={body[name]!s:.200}" for name in _SETTINGS if body.get(name) is not None)
    return f"generation settings {settings}" if settings else "generation settings"


def settings_error(error: Exception, settings: str, expected: Callable[[], str],
                   draws_without: Callable[[], bool]) -> str | None:
    """Return the client's error message if the call's settings made `model.generate` raise `error`, else None.

    Args:
        settings: from `settings_of`.
        expected: Returns what is not accepted, and what is.
        draws_without: Returns whether the model can sample a token after this prompt with neutral settings. Called if
            decoding failed on values that either the settings or the model may have made.
    """
    if isinstance(error, _OUT_OF_LUCK):
        return None
    if isinstance(error, (FallbackError, UnsupportedOptionError)):
        return _printable(f"{settings}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    if any(_TRANSFORMERS / "models" in file.parents for file in files):
        return None
    known = [file for file in files if _OURS in file.parents or _TRANSFORMERS in file.parents]
    prepares = not any(frame.name in _DECODING for frame in frames)
    by_settings = any(file in _OF_SETTINGS for file in files)
    by_generate = known[-1].parent == _STOCK_GENERATION and (
        prepares or isinstance(error, _WRONG_VALUE) or draws_without())
    if not (by_settings or by_generate):
        return None
    return _reason(f"{settings}: {expected()}", error)


def error_body(reason: str, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's format; ``detail`` holds the reason where FastAPI's own bodies have it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    reason = _printable(reason)
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}, "detail": reason}


def failure(error: Exception) -> tuple[dict[str, Any], int]:
    """Return the body and the status of the answer to a request that raised; only a refusal tells its reason."""
    if isinstance(error, RefusedRequestError):
        return error_body(str(error), 400), 400
    logger.error("hf_paged: a request failed: %r", error, exc_info=error)
    if isinstance(error, EngineDeadError):
        return error_body("the thread that generates has ended: the server has to be started anew", 503), 503
    return error_body("the server failed to make this answer; its log has the reason", 500), 500


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def failed_event(error: Exception) -> str:
    """Return the event of an answer that fails after its first token."""
    return event({"error": failure(error)[0]["error"]})


def _reason(expected: str, error: Exception) -> str:
    text = str(error)
    return _printable(f"{expected} ({type(error).__name__}{': ' if text else ''}{text})")


def _printable(text: str) -> str:
    """Return the text as one line of UTF-8: a JSON body may hold a lone surrogate, which UTF-8 cannot encode."""
    return " ".join(text.replace('"', "'").split())[:MAX_LENGTH].encode("utf-8", "backslashreplace").decode()
