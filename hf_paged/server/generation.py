"""Generation for one prompt of an HTTP request: by the engine, or by `model.generate` if the engine cannot run it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from hf_paged.engine.engine import Engine
from hf_paged.engine.features.grammars import BARRED
from hf_paged.engine.features.stop_rules import TextStopRule, deadline_after
from hf_paged.engine.text import StopPolicy, cut
from hf_paged.errors import EngineClosedError, UnsupportedOptionError
from hf_paged.integration.adapters import each_under
from hf_paged.integration.continuous_batching.requests import batching_config, spec_in_room
from hf_paged.integration.paths import CALL_SALT, within
from hf_paged.integration.recognise.criteria import CallEndedError, EndOfCall
from hf_paged.integration.recognise.images import on_device, with_images
from hf_paged.integration.recognise.structured import NO_FORM, Form
from hf_paged.options.arguments import merge_config
from hf_paged.options.processors import Prompt
from hf_paged.options.request_spec import RequestSpec, changed
from hf_paged.options.settings import request_spec
from hf_paged.outputs import Completion, StepOutput
from hf_paged.sampling.sampler import derive_seed
from hf_paged.server.errors import EngineDeadError, FailedRequestError, RefusedRequestError, blaming, settings_error
from hf_paged.server.lifetime import Exchange
from hf_paged.server.protocol import RequestBody
from hf_paged.server.served_model import ServedModel

# A request with more new tokens than there is room for runs by `model.generate`, which goes past the model's positions,
# if the room is below this; otherwise the request ends there as "length".
LEAST_ROOM = 1024
# Options of results besides tokens, which no answer of the server contains.
_NOT_TOKENS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
               "output_hidden_states")

Outputs = AsyncIterator[list[tuple[int, StepOutput]]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """All choices of one prompt.

    Attributes:
        count: the number of choices, each with the settings ``config``.
        first: the number of choices of earlier prompts of the HTTP request, from which seeds are derived.
        skips_special: the text contains no special tokens.
        settings: the text by which errors name the generation settings of the body.
        own_seed: random, for a body without a seed.
    """

    served: ServedModel
    exchange: Exchange
    body: RequestBody
    prompt: Prompt
    config: GenerationConfig
    count: int
    first: int
    adapter: str | None
    form: Form
    skips_special: bool
    settings: str
    own_seed: int = dataclasses.field(default_factory=functools.partial(secrets.randbits, 63))

    async def outputs(self, *, stream: bool) -> Outputs:
        """Yield the outputs of the choices with their indexes; without ``stream`` only the last one of each choice.

        Raises:
            RefusedRequestError: the request cannot run; the message is for the client.
            FailedRequestError, EngineDeadError: generation failed.
        """
        reason: Exception | str = "hf_paged does not run this model"
        if (engine := self.served.engine) is not None:
            try:
                requests = await (asyncio.get_running_loop().run_in_executor(
                    self.served.towers, self._requests, engine) if self.prompt.inputs else asyncio.to_thread(
                    self._requests, engine))
            except RefusedRequestError:
                raise
            except (ValueError, TypeError) as error:
                reason = error
            else:
                call = self.served.new_call(stream=stream)
                self.exchange.at_end.callback(self.served.end, call)
                with _failing():
                    added = await self.served.begin(call, requests)
                refused = [one for one in added if isinstance(one, ValueError)]
                if not refused:
                    numbers = {request_id: index for index, request_id in enumerate(added)}
                    while True:
                        with _failing():
                            outputs = await call.outputs()
                        if not outputs:
                            return
                        yield [(numbers[output.request_id], _checked(output)) for output in outputs]
                self.served.end(call)
                reason = refused[0]
        if names := changed(self.body.options()):
            raise RefusedRequestError(f"{names[0]}: expected it left out, since only requests that the engine runs "
                                      f"have it, and this one runs by model.generate ({reason})")
        async for item in self._stock_outputs(stream):
            yield [item]

    def seed_of(self, index: int) -> int:
        """Return the seed of a choice; torch's global generator, which other requests seed, has no part in it."""
        seed = self.body.seed if self.body.seed is not None else self.served.seed
        return derive_seed(self.own_seed if seed is None else seed % 2**63, self.first + index)

    # -- by the engine ------------------------------------------------------------------------------------------------

    def _requests(self, engine: Engine) -> list[RequestSpec]:
        """Return the requests of the choices; raises an exception of any kind if the engine does not run them."""
        engine.check_runnable()
        model, prompt = engine.model, engine.check_prompt(self.prompt.ids)
        # One sequence a request: each choice is a request of its own.
        config = batching_config(model, tokens_only(self.config), {"num_return_sequences": None})
        adapter = None if self.adapter is None else engine.check_adapter(self.adapter)
        options = {**self.body.options(), "include_stop_str_in_output": not self.body.cuts_stop,
                   "skip_special_tokens": self.skips_special}
        spec, _ = spec_in_room(engine, config, prompt, options, LEAST_ROOM, adapter_name=adapter,
                               cache_salt=self.exchange.cache_salt, structured=self.form.structured,
                               grammar=self.form.grammar)
        spec = with_images(engine, spec, self.prompt.inputs, blaming("messages: expected images that the model takes"))
        return [spec.but(seed=self.seed_of(index),
                         stop=None if not spec.stop_strings else TextStopRule(
                             spec.stop_strings, self.served.tokenizer, deadline_after(spec.max_time)))
                for index in range(self.count)]

    # -- by `model.generate` ------------------------------------------------------------------------------------------

    async def _stock_outputs(self, stream: bool) -> AsyncIterator[tuple[int, StepOutput]]:
        """Run the choices in the thread of `model.generate`, one after the other."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, StepOutput] | Exception] = asyncio.Queue()

        def send(item: tuple[int, StepOutput] | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        for index in range(self.count):
            self.served.stock.submit(_StockCall(self, index, stream, send).run)
        left = self.count
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].completion is not None
            yield item


class _StockCall:
    """The call of `model.generate` for one choice, in the thread of such calls."""

    def __init__(self, generation: Generation, index: int, stream: bool,
                 send: Callable[[tuple[int, StepOutput] | Exception], None]) -> None:
        self._of, self._index, self._stream, self._send = generation, index, stream, send
        body = generation.body
        self._policy = StopPolicy(body.stop_texts, keeps_stop=not body.cuts_stop,
                                  skips_special=generation.skips_special)
        self._text = self._policy.stream(generation.served.tokenizer)
        self._num_sent, self._has_prompt = 0, False

    def run(self) -> None:
        """Send the outputs of the choice, or the exception that ended it; nothing if the client has left."""
        try:
            self._send((self._index, self._last(self._generate())))
        except CallEndedError:
            pass
        except Exception as error:
            self._send(error)

    def put(self, value: torch.Tensor) -> None:
        """Send new tokens, as a streamer: the first value is the prompt."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        tokens = value.flatten().tolist()  # several if guesses were accepted
        self._num_sent += len(tokens)
        self._send((self._index, StepOutput("", tokens, self._text.push(tokens))))

    def end(self) -> None:
        """Do nothing: `run` sends the last output."""

    def _last(self, tokens: list[int]) -> StepOutput:
        of, tokenizer, policy = self._of, self._of.served.tokenizer, self._policy
        made = tokenizer.decode(tokens)
        is_met = cut(made, policy.stop_strings)[1]
        reason = "stop" if is_met else "eos" if self._has_ended(tokens, made) else "length"
        text, fresh = policy.text(reason if is_met else "length", tokens, tokenizer), tokens[self._num_sent :]
        piece = (self._text.push(fresh) if policy.keeps_stop else "") + self._text.finish(text)
        return StepOutput("", fresh, piece, reason, Completion(tokens, text, reason, of.prompt.ids))

    def _has_ended(self, tokens: list[int], text: str) -> bool:
        """Return whether an output ends by EOS or by stop strings of a config, and is not cut by a length or a time."""
        def of_config(name: str) -> tuple[Any, ...]:
            value = getattr(self._of.config, name)
            if value is None:
                value = getattr(self._of.served.model.generation_config, name)
            return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)

        ends_by_token = bool(tokens) and tokens[-1] in of_config("eos_token_id")
        return ends_by_token or cut(text, of_config("stop_strings"))[1]

    def _generate(self) -> list[int]:
        """Call `model.generate` with the request's salt, seed, form and adapter.

        Raises:
            CallEndedError: the HTTP request ended.
            RefusedRequestError: `model.generate` does not accept the settings.
            FailedRequestError: it failed for another reason.
        """
        of, model = self._of, self._of.served.model
        end = EndOfCall(of.exchange.over)
        inputs = self._inputs()
        try:
            end.check()  # the request may have ended while it was queued
            _check(of.config)
            torch.manual_seed(of.seed_of(self._index))
            more = {} if of.form is NO_FORM else {"structured": of.form}
            with within(CALL_SALT, of.exchange.cache_salt), self._adapter(of.config):
                made = model.generate(**inputs, **more, generation_config=tokens_only(of.config),
                                      streamer=self if self._stream else None, tokenizer=of.served.tokenizer,
                                      stopping_criteria=StoppingCriteriaList([end]))
        except (CallEndedError, RefusedRequestError):
            raise
        except Exception as error:
            expected = functools.partial(_expected, model, of.config, inputs)
            reason = settings_error(error, of.settings, expected, self._draws)
            if reason is None:
                raise FailedRequestError(f"{type(error).__name__}: {error}") from error
            raise RefusedRequestError(reason) from error
        return made[0, inputs["input_ids"].shape[1] :].tolist()

    def _inputs(self) -> dict[str, Any]:
        of, model = self._of, self._of.served.model
        ids = torch.tensor([of.prompt.ids], dtype=torch.int64, device=model.device)
        others = on_device(model, of.prompt.inputs)
        if hasattr(model, "has_talker"):  # a model that also speaks
            others["generation_mode"] = "text"
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **others}

    def _adapter(self, config: GenerationConfig) -> AbstractContextManager[None]:
        """Return a context in which rows of the model use the request's adapter."""
        name = self._of.adapter
        return nullcontext() if name is None else each_under(self._of.served.model, [name], config)

    def _draws(self) -> bool:
        """Return whether a token can be drawn after this prompt with settings that do not change the logits."""
        plain = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        try:
            with within(CALL_SALT, self._of.exchange.cache_salt), self._adapter(plain):  # salted: it is cached
                self._of.served.model.generate(**self._inputs(), generation_config=plain)
        except Exception:
            return False
        return True


@contextmanager
def _failing() -> Iterator[None]:
    """Turn an exception of the engine into one of the server."""
    try:
        yield
    except (EngineDeadError, asyncio.CancelledError):
        raise
    except Exception as error:
        kind = EngineDeadError if isinstance(error, EngineClosedError) else FailedRequestError
        raise kind(f"{type(error).__name__}: {error}") from error
    except BaseException as error:  # ended the engine's thread, and must not end the event loop
        raise EngineDeadError(f"the thread that generates has ended: {error!r}") from error


def tokens_only(config: GenerationConfig) -> GenerationConfig:
    """Return a copy of `config` with which generate returns tokens alone."""
    config = copy.deepcopy(config)
    for name in _NOT_TOKENS:
        setattr(config, name, False)
    return config


def _checked(output: StepOutput) -> StepOutput:
    """Return an output of the engine, or raise the error that ended its request."""
    if output.finish_reason == "error":
        assert output.completion is not None
        error = str(output.completion.error)
        raise RefusedRequestError(error) if BARRED in error else FailedRequestError(error)
    if output.finish_reason == "abort":
        raise EngineDeadError("the server stopped before this request was done")
    return output


def _expected(model: Any, config: GenerationConfig, inputs: dict[str, Any]) -> str:
    """Return the engine's error for these settings, which names options and accepted values."""
    try:
        merged = merge_config(model, tokens_only(config), {})
        request_spec(merged, inputs["input_ids"].shape[1], model.config.get_text_config().vocab_size)
    except UnsupportedOptionError:
        pass
    except (ValueError, TypeError) as error:
        return str(error)
    return "expected values that transformers' GenerationConfig documents"


def _check(config: GenerationConfig) -> None:
    """Raise RefusedRequestError for settings with which stock generate crashes, or breaks the model for others."""
    if isinstance(config.num_beams, int) and config.num_beams < 1:
        raise RefusedRequestError(f"num_beams={config.num_beams}: expected an integer of at least 1")
    early_exit = config.assistant_early_exit
    if early_exit is not None:  # stock removes layers for its drafts, and does not restore them if a draft raises
        raise RefusedRequestError(f"assistant_early_exit={early_exit!r:.200}: expected null, since other requests run "
                                  "on the same model")
