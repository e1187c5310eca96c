"""One HTTP request that generates: its cache salt, what ends together with it, and `model.generate` on its behalf."""

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

# What generate returns besides tokens; the server's answers hold nothing of it.
_NOT_TOKENS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
               "output_hidden_states")

CURRENT: ContextVar[ServedCall | None] = ContextVar("hf_paged_served_call", default=None)


class RefusedRequestError(ValueError):
    """The request cannot be carried out; the message is for its client."""


class ServedCall:
    """What the server knows of one HTTP request besides its body. Made on the server's event loop.

    Args:
        cache_salt: cached prefixes are shared with requests of the same salt alone (None: of none).
        on_enabled: called when a model was enabled for it.

    Attributes:
        over: set when the HTTP request has ended, answered or abandoned by its client.
        streams: a streamed answer was started, whose status depends on `verdict`.
        settings: the generation settings of its body, as reasons name them.
        wishes: what its body asks for.
        adapter_name: of the LoRA adapter that its `model` field names; None: it names the model.
        form: that the answer has to have, once the grammar is there.
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
        """The HTTP request that is being answered in this context, or a new one where none was noted."""
        return CURRENT.get() or cls()

    def at_end(self, action: Callable[[], None]) -> None:
        """Do it when the HTTP request ends, however it does."""
        self._at_end.append(action)

    def end(self) -> None:
        """The client does not wait for the answer any more."""
        self.over.set()
        while self._at_end:
            self._at_end.pop()()

    def begin(self) -> None:
        """The generation made its first token, or ended without one. From any thread."""
        self._loop.call_soon_threadsafe(self._settled.set)

    def refuse(self, reason: str) -> None:
        """The request cannot be carried out, for this reason. From any thread."""
        self.refusal = self.refusal or reason
        self.begin()

    async def verdict(self) -> str | None:
        """Why the request was refused; None once it began."""
        await self._settled.wait()
        return self.refusal


def tokens_only(config: GenerationConfig) -> GenerationConfig:
    """A copy of `config` with which generate returns tokens alone."""
    config = copy.deepcopy(config)
    for name in _NOT_TOKENS:
        setattr(config, name, False)
    return config


class GeneratesFor:
    """A model as the server's code uses it, whose `generate` runs for one HTTP request and ends with it.

    `index`: of the choice of the answer, which has a seed of its own.
    """

    def __init__(self, model: Any, call: ServedCall, index: int = 0) -> None:
        self._model = model
        self._call = call
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, generation_config: GenerationConfig, streamer: Any = None, **kwargs: Any) -> Any:
        """`model.generate` under the request's salt.

        Raises:
            CallEndedError: the HTTP request ended.
            RefusedRequestError: the settings are such that `model.generate` cannot carry them out.
        """
        call = self._call
        end = EndOfCall(call.over)
        try:
            end.check()  # it may have waited for its turn
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
        """In here rows of the model run under the request's adapter."""
        name = self._call.adapter_name
        return nullcontext() if name is None else each_under(self._model, [name] * len(inputs["input_ids"]), config)

    def _draws(self, inputs: dict[str, Any]) -> bool:
        """Can one token be drawn after this prompt, with settings that leave the logits alone?"""
        plain = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        try:
            with call_salt(salt_digest(self._call.cache_salt)), self._adapter(inputs, plain):  # it is cached here, too
                self._model.generate(generation_config=plain, **inputs)
        except Exception:
            return False
        return True


def _expected(model: Any, config: GenerationConfig, inputs: dict[str, Any]) -> str:
    """The engine's error for these settings: it names options and accepted values where transformers may not."""
    try:
        merged = merge_config(model, tokens_only(config), {})
        settings_from_config(merged, inputs["input_ids"].shape[1], model.config.get_text_config().vocab_size)
    except UnsupportedOptionError:
        pass
    except (ValueError, TypeError) as error:
        return str(error)
    return "expected values that transformers' GenerationConfig documents"


def _check(input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> None:
    """What stock generate notices only by breaking, or breaks the model for others with."""
    if input_ids.numel() == 0:
        raise RefusedRequestError("prompt: expected at least one token")
    num_beams = generation_config.num_beams
    if isinstance(num_beams, int) and num_beams < 1:
        raise RefusedRequestError(f"num_beams={num_beams}: expected an integer of at least 1")
    early_exit = generation_config.assistant_early_exit
    if early_exit is not None:  # stock's drafts take layers off the model, and leave it so where they break
        raise RefusedRequestError(f"assistant_early_exit={early_exit!r:.200}: expected null, since other requests run "
                                  "on the same model")


class _BeginsWithAToken:
    """Passes on what `generate` streams, the prompt first, and notes the first token."""

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
