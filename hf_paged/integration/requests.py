"""Conversion of a call of a `PagedGenerator` into requests of the engine: all are checked before any of them runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_paged.config import require_int
from hf_paged.engine.engine import Engine
from hf_paged.engine.session import NewRequest, copy_ids
from hf_paged.errors import UnsupportedModelError, UnsupportedOptionError
from hf_paged.integration.best_of import num_candidates
from hf_paged.options.argument_warnings import ArgumentWarnings
from hf_paged.options.arguments import base_seed, num_copies, salt_digest
from hf_paged.options.chat_keywords import split_keywords, template_parameters
from hf_paged.options.continued import PreviousOutput, split_output
from hf_paged.options.keywords import DEFAULTS, OF_CALL
from hf_paged.options.prompts import prompt_ids, prompt_list
from hf_paged.options.read import MergeCache, SettingsReader
from hf_paged.options.request_options import (
    PLAIN,
    RequestOptions,
    RequestSettings,
    check_options,
    check_priority,
    scoring_only,
)
from hf_paged.options.structured import Structured, read_structured
from hf_paged.outputs import Completion, StepOutput
from hf_paged.sampling.sampler import derive_seed
from hf_paged.sampling.token_log_probs import PROCESSED

ON_ERROR = ("raise", "complete")


@dataclass(frozen=True)
class Call:
    """The unchecked arguments of `PagedGenerator.generate`; `keywords` has those of its ``generate_kwargs``."""

    prompts: Any
    generation_config: Any
    seed: Any
    cache_salt: Any
    adapter_names: Any
    options: RequestOptions
    priority: Any
    best_of: Any
    on_error: str
    chat_template_kwargs: Any
    request_ids: Any
    keywords: dict[str, Any]
    structured: Any

    @classmethod
    def of(cls, prompts: Any, generation_config: Any = None, **keywords: Any) -> Call:
        """Return the call with these arguments, and the defaults of `PagedGenerator.generate` for others."""
        options = RequestOptions.among(keywords)
        named = {name: keywords.pop(name, DEFAULTS.get(name)) for name in OF_CALL}
        return cls(prompts, generation_config, options=options, keywords=keywords, **named)

    @property
    def scores_only(self) -> bool:
        """Whether no token is to be generated (``max_new_tokens=0``)."""
        count = self.keywords.get("max_new_tokens")
        return type(count) is int and count == 0

    def check(self, vocab_size: int) -> None:
        """Raise TypeError or ValueError for arguments that are wrong for every prompt; ``vocab_size`` as in
        `settings_with`."""
        check_options(self.options, vocab_size)
        if not isinstance(self.priority, (list, tuple)):
            check_priority(self.priority)
        if not isinstance(self.best_of, (list, tuple)):
            require_int("best_of", self.best_of, 1, optional=True)
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error={self.on_error!r:.80}: expected one of {ON_ERROR}")

    def check_for_stream(self) -> None:
        """Raise ValueError for ``best_of``, which is decided only when all completions of a prompt have ended."""
        if self.best_of is not None:
            raise ValueError(f"best_of={self.best_of!r:.80}: expected None in a stream, whose tokens come before it is "
                             "known which completions are best")

    def check_for_tensors(self, vocab_size: int) -> None:
        """Call `check`, and raise ValueError for arguments that are not accepted with tensors."""
        self.check(vocab_size)
        others = {"priority": self.priority != 0, "best_of": self.best_of is not None}
        if asked := [*self.options.asked(), *(name for name, is_asked in others.items() if is_asked)]:
            raise ValueError(f"{', '.join(asked)}: expected it left out where tensors come in; give token ids")
        if self.on_error != "raise":
            raise ValueError(f"on_error={self.on_error!r}: expected 'raise' where tensors come in; give token ids")
        if self.request_ids is not None:
            raise ValueError(f"request_ids={self.request_ids!r:.80}: expected None where tensors come in; give token "
                             "ids")
        of_template = sorted({*(self.chat_template_kwargs or ()), *(template_parameters(None) & {*self.keywords})} -
                             {*vars(GenerationConfig())})
        if of_template:
            raise ValueError(f"{', '.join(of_template)}: for the template of chats, and tensors come in; give chats")

    def failed(self, index: int, error: Exception, ids: list[int]) -> Completion:
        """Return the completion of a prompt that cannot run, or raise its error with ``on_error="raise"``."""
        if self.on_error == "raise":
            kinds = UnsupportedOptionError, TypeError, ValueError
            kind = next((kind for kind in kinds if isinstance(error, kind)), None)
            text = error_text(error) if kind is None else str(error)
            raise (kind or ValueError)(f"prompts[{index}]: {text}") from error
        # A copy of the ids, so that no other completion of the prompt has the same list.
        return Completion([], None, "error", list(ids), error=error_text(error))


class PlannedCompletion(NamedTuple):
    """A completion to be made: the index of its prompt, its request (or its completion, if it cannot run), and how many
    of the prompt's completions are returned (``best``; None for all)."""

    prompt: int
    what: NewRequest | Completion
    best: int | None = None


class RequestMaker:
    """The maker of the requests of one generator's calls.

    Args:
        engine: the engine that runs the requests.
        model: the causal LM.
    """

    def __init__(self, engine: Engine, model: Any) -> None:
        self._engine, self._model = engine, model
        self._notices = ArgumentWarnings()
        self._merges = MergeCache()

    def make(self, call: Call) -> list[PlannedCompletion]:
        """Return every completion of the call, in order.

        Raises:
            ValueError, TypeError: an argument of the whole call is wrong; with ``on_error="raise"`` also if a prompt
                cannot run, with the index of the first.
        """
        engine, model = self._engine, self._model
        engine.check_runnable()
        call.check(engine.num_logits)
        given = [_attempt(split_output, prompt) for prompt in prompt_list(call.prompts)]
        prompts = [one if isinstance(one, Exception) else one[0] for one in given]
        configs = one_per_prompt("generation_config", call.generation_config, len(prompts))
        own_seeds, autocast = isinstance(call.seed, (list, tuple)), engine.autocast_of_call()
        seed = call.seed if own_seeds else base_seed(call.seed, engine.config.seed)
        seeds = one_per_prompt("seed", seed, len(prompts))
        salts = one_per_prompt("cache_salt", call.cache_salt, len(prompts))
        adapters = self._adapters(call.adapter_names, len(prompts))
        forms = self._forms(call.structured, len(prompts))
        request_ids = self._request_ids(call.request_ids, len(prompts))
        if not isinstance(call.cache_salt, (list, tuple)):
            salt_digest(call.cache_salt)
        own_entries = [model.generation_config, *{id(config): config for config in configs}.values()]
        options = call.options.per_prompt(len(prompts))
        priorities = [check_priority(one) for one in one_per_prompt("priority", call.priority, len(prompts))]
        most = one_per_prompt("best_of", call.best_of, len(prompts))
        given_keywords = {**call.keywords, "max_new_tokens": 1} if call.scores_only else call.keywords
        template, keywords = split_keywords(given_keywords, call.chat_template_kwargs, prompts, engine.tokenizer,
                                            own_entries)
        read = SettingsReader(model, keywords, self._merges, engine.num_logits)
        asked: list[PlannedCompletion] = []
        max_model_len = engine.max_model_len
        for index, ids in enumerate(self._checked(prompts, template)):
            config = configs[index]
            if isinstance(given[index], Exception):
                ids = given[index]
            try:
                if isinstance(ids, Exception):
                    raise ids
                if isinstance(adapter := adapters[index], Exception):
                    raise adapter
                if isinstance(form := forms[index], Exception):
                    raise form
                merged = read.merged(config)
                self._notices.look(merged, config, keywords, model.generation_config)
                settings, wanted = self._settled(ids, config, call, read, options[index], salts[index], adapter)
                self._notices.look_at_length(len(ids), settings.max_new_tokens, max_model_len, config, keywords)
                copies = wanted if most[index] is None else num_candidates(most[index], wanted, settings)
                if most[index] is not None and settings.logprobs is None:
                    settings = replace(settings, logprobs=PROCESSED)
                if form is not None:
                    settings = replace(settings, structured=form)
                before = self._before(ids, given[index][1], settings, copies)
                first = 0 if own_seeds else len(asked)
                names = copy_ids(request_ids[index], copies)
                made = [self._request(ids, settings, seeds[index], first + copy, before, autocast=autocast,
                                      request_id=names[copy], priority=priorities[index]) for copy in range(copies)]
            except UnsupportedModelError:
                raise
            except Exception as error:
                if not any(error is one for one in (ids, adapters[index], forms[index])):
                    if not isinstance(error, (TypeError, ValueError)):
                        raise
                    if config is call.generation_config:  # raises if the error is one of every prompt
                        of_all = options[index] if options[index] is call.options else PLAIN
                        self._settled([0], config, call, read, of_all, None, None)
                failed = call.failed(index, error, [] if isinstance(ids, Exception) else ids)
                asked += [PlannedCompletion(index, failed)] * _copies_of(config, keywords, model.generation_config)
            else:
                asked += [PlannedCompletion(index, request, wanted if copies > wanted else None) for request in made]
        return asked

    def _request_ids(self, given: Any, count: int) -> list[str | None]:
        """Return each prompt's id of ``request_ids``, or None."""
        seen: set[str] = set()
        for name in (names := one_per_prompt("request_ids", given, count)):
            if name is None:
                continue
            if not isinstance(name, str) or not name:
                raise TypeError(f"request_ids: {name!r:.200} is one; expected str with at least one character, or None")
            if name in seen or self._engine.unfinished_copies(name):
                raise ValueError(f"request_ids: {name!r:.200} is in use; expected another id for each prompt")
            seen.add(name)
        return [None if name is None else str.__str__(name) for name in names]

    def _adapters(self, names: Any, count: int) -> list[str | Exception | None]:
        """Return each prompt's adapter, or the exception that says why the prompt cannot use it."""
        given, check = one_per_prompt("adapter_names", names, count), self._engine.check_adapter
        if names is not None and not isinstance(names, (list, tuple)):
            return [check(names)] * count
        kinds = TypeError, ValueError
        found = {name: _attempt(check, name, kinds) for name in dict.fromkeys(n for n in given if isinstance(n, str))}
        return [found[name] if isinstance(name, str) else name if name is None else _attempt(check, name, kinds)
                for name in given]

    def _forms(self, structured: Any, count: int) -> list[Structured | Exception | None]:
        """Return each prompt's form of the output, or the exception that says why the form is refused."""
        given, check = one_per_prompt("structured", structured, count), self._engine.check_structured
        if not isinstance(structured, (list, tuple)) or isinstance(structured, Structured):
            return [check(structured)] * count
        begun = self.begin_forms(structured)  # so that all forms compile in parallel
        try:
            return [None if one is None else _attempt(check, one, (TypeError, ValueError)) for one in given]
        finally:
            for waiter in begun:
                waiter.cancel()

    def begin_forms(self, structured: Any) -> list[Future[Any]]:
        """Start to compile the forms of a call, and return futures; errors are left to `make`."""
        is_one = not isinstance(structured, (list, tuple)) or isinstance(structured, Structured)
        begun = []
        for one in [structured] if is_one else structured:
            with suppress(TypeError, ValueError, ImportError):
                if (read := read_structured(one)) is not None:
                    begun.append(self._engine.begin_grammar(read))
        return begun

    def _checked(self, prompts: list[Any], template: dict[str, Any]) -> list[list[int] | Exception]:
        """Return each prompt's token ids, or the exception that says why the prompt cannot run."""
        forms = [_attempt(lambda prompt: prompt_ids(prompt, self._engine.tokenizer, template), p) for p in prompts]
        if not any(isinstance(form, Exception) for form in forms):
            with suppress(TypeError, ValueError):
                return list(self._engine.check_prompts(forms))
        check = self._engine.check_prompt
        return [f if isinstance(f, Exception) else _attempt(check, f, (TypeError, ValueError)) for f in forms]

    def _settled(self, ids: list[int], config: GenerationConfig | None, call: Call, read: SettingsReader,
                 options: RequestOptions, salt: Any, adapter: Any) -> tuple[RequestSettings, int]:
        """Return the settings of one prompt, and its number of completions."""
        settings = read.settings(config, len(ids), options)
        if call.scores_only:
            settings = scoring_only(settings)
        if salt is not None:
            settings = replace(settings, cache_salt=salt_digest(salt))
        if adapter is not None:
            settings = replace(settings, adapter_name=adapter)
        copies = num_copies(read.merged(config).num_return_sequences)
        if copies > 1 and not settings.do_sample:
            raise ValueError(f"num_return_sequences={copies!r}: expected 1, or more with do_sample=True")
        self._engine.stop_rule(settings, ids)
        return settings, copies

    def _before(self, ids: list[int], made: PreviousOutput | None, settings: RequestSettings,
                copies: int) -> PreviousOutput | None:
        """Return the earlier output that a prompt continues after checking it, or None."""
        if made is None:
            return None
        if copies > 1 and made.seed is not None:
            raise ValueError(f"num_return_sequences={copies!r}: expected 1 for a Completion, which draws on with its "
                             "own seed; for several ways on give its prompt_token_ids and output_token_ids")
        return self._engine.check_made(ids, made, settings)

    def _request(self, ids: list[int], settings: RequestSettings, seed: Any, number: int, made: PreviousOutput | None,
                 **others: Any) -> NewRequest:
        seed = derive_seed(base_seed(seed, self._engine.config.seed), number)
        if made is not None and made.seed is not None:
            seed = made.seed
        return NewRequest(ids, settings, seed=seed, stop=self._engine.stop_rule(settings, ids), made=made, **others)


def wanted(asked: list[PlannedCompletion]) -> list[NewRequest]:
    """Return the requests among planned completions."""
    return [one.what for one in asked if isinstance(one.what, NewRequest)]


def numbered(call: Call, asked: list[PlannedCompletion],
             added: list[str | ValueError]) -> tuple[dict[str, int], list[tuple[int, StepOutput]]]:
    """Return the index of each added request's completion by request id, and the outputs of all other completions.

    Args:
        call: with ``on_error="raise"`` a request that the engine refuses raises its error.
        asked: all planned completions.
        added: the result of `Engine.add_all` for `wanted`.
    """
    index: dict[str, int] = {}
    refused: list[tuple[int, StepOutput]] = []
    answers = iter(added)
    for number, one in enumerate(asked):
        if isinstance(one.what, Completion):
            refused.append((number, refused_output(one.what)))
        elif isinstance(answer := next(answers), str):
            index[answer] = number
        else:  # `Engine.add` refused the request, for settings that the device's tables cannot hold for instance
            refused.append((number, refused_output(call.failed(one.prompt, answer, one.what.prompt))))
    return index, refused


def refused_output(completion: Completion) -> StepOutput:
    """Return the only output of a prompt that never became a request; its request id is empty."""
    return StepOutput("", [], None, completion.finish_reason, completion)


def error_text(error: Exception) -> str:
    """Return the text of an exception in `Completion.error`."""
    return f"{type(error).__name__}: {error}"


def _attempt(check: Callable[[Any], Any], prompt: Any, kinds: tuple[type[Exception], ...] = (Exception,)) -> Any:
    """Return what `check` returns or raises for a prompt; a chat template may raise any exception."""
    try:
        return check(prompt)
    except UnsupportedModelError:
        raise
    except kinds as error:
        return error


def _copies_of(config: Any, keywords: dict[str, Any], of_model: GenerationConfig) -> int:
    """Return the number of completions of a prompt that cannot run; 1 if ``num_return_sequences`` itself is wrong."""
    name = "num_return_sequences"
    asked = [keywords.get(name), getattr(config, name, None), getattr(of_model, name, None)]
    try:
        return num_copies(next((value for value in asked if value is not None), None))
    except (TypeError, ValueError):
        return 1


def one_per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return `value` for each prompt, or the values of a list; raises ValueError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: a list of {len(value)} for {count} prompts; expected one, or one per prompt")
    return list(value)
