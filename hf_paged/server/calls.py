"""HTTP requests that generate: their settings, their end, and `model.generate` for them."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from hf_paged.errors import UnsupportedOptionError
from hf_paged.integration.adapter_rows import each_under
from hf_paged.integration.call_context import call_salt
from hf_paged.integration.stock_pieces import CallEndedError, EndOfCall
from hf_paged.integration.structured_calls import NO_FORM
from hf_paged.options.arguments import merge_config, salt_digest
from hf_paged.options.settings import settings_from_config
from hf_paged.sampling.sampler import derive_seed
from hf_paged.server.errors import settings_error
from hf_paged.server.server_request import ServerRequest

# Options of results besides tokens, which no answer of the server contains.
_NOT_TOKENS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
               "output_hidden_states")

CURRENT: ContextVar[ServedCall | None] = ContextVar("hf_paged_served_call", default=None)


class RefusedRequestError(ValueError):
    """An error of a request that cannot run; the message is for its client."""


class ServedCall:
    """The server's state of one HTTP request. Made on the server's event loop.

    Args:
        cache_salt: the request shares cached prefixes only with requests of the same salt (or, for None, of none).
        on_enabled: called when a model was enabled for the request.

    Attributes:
        over: set when the HTTP request has ended, answered or abandoned by its client.
        streams: a streamed answer was started, whose status depends on `verdict`.
        settings: the text by which error messages name the generation settings of the body.
        wishes: the fields of the body.
        adapter_name: the LoRA adapter that the body's `model` field names; None if it names the model.
        form: the form of the answer; set when its grammar is compiled.
    """

    def __init__(self, cache_salt: str | None = None, on_enabled: Callable[[], None] = lambda: None) -> None:
        self.cache_salt = cache_salt
        self.on_enabled = on_enabled
        self.over = threading.Event()
        self.streams = False
        self.settings = "generation settings"
        self.wishes = ServerRequest()
        self.adapter_name: str | None = None
        self.form = NO_FORM
        self.refusal: str | None = None
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()
        self._at_end: list[Callable[[], None]] = []

    @classmethod
    def current(cls) -> ServedCall:
        """Return the HTTP request that is answered in this context, or a new one if there is none."""
        return CURRENT.get() or cls()

    def at_end(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the HTTP request ends, answered or abandoned."""
        self._at_end.append(action)

    def end(self) -> None:
        """End the request, since the client has its answer or does not wait for it any more."""
        self.over.set()
        while self._at_end:
            self._at_end.pop()()

    def begin(self) -> None:
        """Note that generation made its first token, or ended without one. Thread-safe."""
        self._loop.call_soon_threadsafe(self._settled.set)

    def refuse(self, reason: str) -> None:
        """Refuse the request for this reason. Thread-safe."""
        self.refusal = self.refusal or reason
        self.begin()

    async def verdict(self) -> str | None:
        """Wait until the request begins or is refused; returns the reason of the refusal, or None."""
        await self._settled.wait()
        return self.refusal


def tokens_only(config: GenerationConfig) -> GenerationConfig:
    """Return a copy of `config` with which generate returns tokens alone."""
    config = copy.deepcopy(config)
    for name in _NOT_TOKENS:
        setattr(config, name, False)
    return config


class GeneratesFor:
    """A wrapper of a model for transformers' server code, whose `generate` runs for one HTTP request and ends with it.

    `index`: index of the answer's choice, which has a seed of its own.
    """

    def __init__(self, model: Any, call: ServedCall, index: int = 0) -> None:
        self._model = model
        self._call = call
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, generation_config: GenerationConfig, streamer: Any = None, **kwargs: Any) -> Any:
        """Call `model.generate` with the request's salt, seed, form and adapter.

        Raises:
            CallEndedError: the HTTP request ended.
            RefusedRequestError: `model.generate` does not accept the settings.
        """
        call = self._call
        end = EndOfCall(call.over)
        try:
            end.check()  # the request may have ended while it was queued
            _check(generation_config=generation_config, **kwargs)
            if streamer is not None:
                streamer = _BeginsWithAToken(streamer, call)
            if call.form is not NO_FORM:
                kwargs["structured"] = call.form
            if call.wishes.seed is not None:
                torch.manual_seed(derive_seed(call.wishes.seed, self._index))
            with call_salt(salt_digest(call.cache_salt)), self._adapter(kwargs, generation_config):
                return self._model.generate(generation_config=tokens_only(generation_config), streamer=streamer,
                                            stopping_criteria=StoppingCriteriaList([end]), **kwargs)
        except CallEndedError:
            raise
        except Exception as error:
            reason = self._reason(error, generation_config, kwargs)
            if reason is None:
                raise
            call.refuse(reason)
            raise RefusedRequestError(reason) from error
        finally:
            call.begin()

    def _reason(self, error: Exception, config: GenerationConfig, inputs: dict[str, Any]) -> str | None:
        if isinstance(error, RefusedRequestError):
            return str(error)
        return settings_error(error, self._call.settings, functools.partial(_expected, self._model, config, inputs),
                              functools.partial(self._draws, inputs))

    def _adapter(self, inputs: dict[str, Any], config: GenerationConfig) -> AbstractContextManager[None]:
        """Return a context in which rows of the model use the request's adapter."""
        name = self._call.adapter_name
        return nullcontext() if name is None else each_under(self._model, [name] * len(inputs["input_ids"]), config)

    def _draws(self, inputs: dict[str, Any]) -> bool:
        """Return whether a token can be drawn after this prompt with settings that do not change the logits."""
        plain = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        try:
            with call_salt(salt_digest(self._call.cache_salt)), self._adapter(inputs, plain):  # salted: it is cached
                self._model.generate(generation_config=plain, **inputs)
        except Exception:
            return False
        return True


def _expected(model: Any, config: GenerationConfig, inputs: dict[str, Any]) -> str:
    """Return the engine's error for these settings, which names options and accepted values."""
    try:
        merged = merge_config(model, tokens_only(config), {})
        settings_from_config(merged, inputs["input_ids"].shape[1], model.config.get_text_config().vocab_size)
    except UnsupportedOptionError:
        pass
    except (ValueError, TypeError) as error:
        return str(error)
    return "expected values that transformers' GenerationConfig documents"


def _check(input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> None:
    """Raise RefusedRequestError for settings with which stock generate crashes, or breaks the model for others."""
    if input_ids.numel() == 0:
        raise RefusedRequestError("prompt: expected at least one token")
    num_beams = generation_config.num_beams
    if isinstance(num_beams, int) and num_beams < 1:
        raise RefusedRequestError(f"num_beams={num_beams}: expected an integer of at least 1")
    early_exit = generation_config.assistant_early_exit
    if early_exit is not None:  # stock removes layers for its drafts, and does not restore them if a draft raises
        raise RefusedRequestError(f"assistant_early_exit={early_exit!r:.200}: expected null, since other requests run "
                                  "on the same model")


class _BeginsWithAToken:
    """A streamer that passes all values on (the prompt first), and notes the first token."""

    def __init__(self, streamer: Any, call: ServedCall) -> None:
        self._streamer = streamer
        self._call = call
        self._num_put = 0

    def put(self, value: Any) -> None:
        self._streamer.put(value)
        self._num_put += 1
        if self._num_put == 2:
            self._call.begin()

    def end(self) -> None:
        self._streamer.end()
