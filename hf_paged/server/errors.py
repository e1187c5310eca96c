"""Attribution of an exception in the server: to the request (status 400, with a reason) or to the server (500)."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.generation

from hf_paged.engine import stop_rules
from hf_paged.errors import FallbackError, UnsupportedOptionError
from hf_paged.options import arguments, logits_options, option_values, table
from hf_paged.options import settings as settings_module

MAX_LENGTH = 1000  # characters of an error message

# What each function of transformers that reads a part of the body expects, by the function's name.
READING = {
    "_resolve_model": "model: expected the id of a model that can be loaded",
    "_normalize_input": "input: expected a string, or a list of messages and items of the Responses API",
    "_normalize_tools": "tools: expected a list of function definitions",
    "get_processor_inputs_from_messages": "messages: expected a list of objects, each with a role and a content "
                                          "(text, or a list of parts with their type)",
    "apply_chat_template": "messages, tools, chat_template_kwargs: expected what the model's chat template can render",
    "build_response_parser": "tools: expected a list of function definitions",
    "_build_generation_config": "expected numbers in their range, and generation_config as a string that holds a JSON "
                                "object of GenerationConfig fields",
    "_check_fields": "fields of the body: expected the types of the OpenAI API",
    "handle_request": "body: expected the fields of the OpenAI API",
}
# Body fields from which transformers builds a request's GenerationConfig.
_SETTINGS = ("generation_config", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens",
             "max_output_tokens", "frequency_penalty", "logit_bias", "stop")
_NOT_READING = ("_streaming", "_non_streaming", "init_cb")  # handle_request calls them after it has read the body
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
      (settings_module, logits_options, option_values, table, arguments, stop_rules)),
}
_DECODING = ("_sample", "_beam_search", "_assisted_decoding", "_prefill")


def settings_of(body: dict[str, Any]) -> str:
    """Format the generation settings of a request for an error message."""
    settings = ", ".join(f"{name}={body[name]!s:.200}" for name in _SETTINGS if body.get(name) is not None)
    return f"generation settings {settings}" if settings else "generation settings"


def reading_error(error: Exception, settings: str) -> str | None:
    """Return the client's error message if `error` was raised while a handler read the body, else None.

    Args:
        settings: Settings of the body, from `settings_of`.
    """
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    stages = [name for name in names if name in READING]
    if not stages or isinstance(error, _OUT_OF_LUCK):
        return None
    stage = stages[-1]
    if stage == "handle_request" and any(name in _NOT_READING for name in names):
        return None
    if stage in ("handle_request", "_resolve_model") and not isinstance(error, (*_WRONG_VALUE, OSError)):
        return None
    expected = READING[stage]
    return _reason(f"{settings}: {expected}" if stage == "_build_generation_config" else expected, error)


def settings_error(error: Exception, settings: str, expected: Callable[[], str],
                   draws_without: Callable[[], bool]) -> str | None:
    """Return the client's error message if the call's settings made `model.generate` raise `error`, else None.

    Args:
        settings: Settings of the body, from `settings_of`.
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


def _reason(expected: str, error: Exception) -> str:
    text = str(error)
    return _printable(f"{expected} ({type(error).__name__}{': ' if text else ''}{text})")


def _printable(text: str) -> str:
    """Return the text as one line of UTF-8 without double quotes: a JSON body may hold a lone surrogate, which UTF-8
    cannot encode, and transformers' streams put an error between double quotes without escaping it."""
    return " ".join(text.replace('"', "'").split())[:MAX_LENGTH].encode("utf-8", "backslashreplace").decode()
