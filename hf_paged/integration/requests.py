"""Conversion of a call of a `PagedGenerator` into specifications of requests: all are checked before any of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from transformers import GenerationConfig

from hf_paged.config import require_int
from hf_paged.engine.engine import Engine
from hf_paged.engine.session import copy_ids
from hf_paged.errors import UnsupportedModelError, UnsupportedOptionError
from hf_paged.integration.recognise.images import with_images
from hf_paged.options.arguments import MOST_COPIES, ArgumentWarnings, base_seed, num_copies, salt_digest
from hf_paged.options.chat_keywords import split_keywords, template_parameters
from hf_paged.options.keywords import DEFAULTS, OF_CALL
from hf_paged.options.processors import Prompt
from hf_paged.options.prompts import prompt_list, read_prompt, split_output
from hf_paged.options.read import MergeCache, SpecReader
from hf_paged.options.request_spec import (
    RequestSpec,
    changed,
    check_options,
    check_priority,
    options_per_prompt,
    take_options,
)
from hf_paged.options.structured import Structured, read_structured
from hf_paged.outputs import Completion, StepOutput
from hf_paged.sampling.log_probs import PROCESSED
from hf_paged.sampling.sampler import derive_seed

ON_ERROR = ("raise", "complete")
MOST_OF_ERROR = 1000  # characters of an error's text


@dataclass(frozen=True)
class Call:
    """The unchecked arguments of `PagedGenerator.generate`.

    Attributes:
        options: the given options of `PLAIN`.
        keywords: the ``generate_kwargs``.
    """

    prompts: Any
    generation_config: Any
    seed: Any
    cache_salt: Any
    adapter_names: Any
    options: dict[str, Any]
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
        options = take_options(keywords)
        named = {name: keywords.pop(name, DEFAULTS.get(name)) for name in OF_CALL}
        return cls(prompts, generation_config, options=options, keywords=keywords, **named)

    @property
    def scores_only(self) -> bool:
        """Whether no token is to be generated (``max_new_tokens=0``)."""
        count = self.keywords.get("max_new_tokens")
        return type(count) is int and count == 0

    def check(self, vocab_size: int) -> None:
        """Raise TypeError or ValueError for arguments that are wrong for every prompt; ``vocab_size`` as in
        `RequestSpec.with_options`."""
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
        others = {"priority": self.priority != 0, "best_of": self.best_of is not None,
                  "on_error": self.on_error != "raise", "request_ids": self.request_ids is not None}
        if given := [*changed(self.options), *(name for name, is_given in others.items() if is_given)]:
            raise ValueError(f"{', '.join(given)}: expected the defaults where tensors come in; give token ids")
        of_template = sorted({*(self.chat_template_kwargs or ()), *(template_parameters(None) & {*self.keywords})} -
                             {*vars(GenerationConfig())})
        if of_template:
            raise ValueError(f"{', '.join(of_template)}: for the template of chats, and tensors come in; give chats")

    def failed(self, index: int, error: Exception, ids: list[int]) -> Completion:
        """Return the completion of a prompt that cannot run, or raise its error with ``on_error="raise"``."""
        if self.on_error == "raise":
            kinds = UnsupportedOptionError, TypeError, ValueError
            kind = next((kind for kind in kinds if isinstance(error, kind)), None)
            text = error_text(error) if kind is None else _shortened(str(error))
            raise (kind or ValueError)(f"prompts[{index}]: {text}") from error
        # A copy of the ids, so that no other completion of the prompt has the same list.
        return Completion([], None, "error", list(ids), error=error_text(error))


class CallReader:
    """The reader of one generator's calls.

    Attributes:
        processor: of images; None for a tokenizer alone.
    """

    def __init__(self, engine: Engine, model: Any) -> None:
        self._engine, self._model = engine, model
        self.processor: Any = None
        self._notices = ArgumentWarnings()
        self._merges = MergeCache()

    @property
    def renderer(self) -> Any:
        """What renders chats: the processor, or the engine's tokenizer."""
        return self._engine.tokenizer if self.processor is None else self.processor

    def read(self, call: Call) -> list[RequestSpec | Completion]:
        """Return, for every completion of the call in order, its request, or the completion if it cannot run.

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
        options = options_per_prompt(call.options, len(prompts))
        priorities = [check_priority(one) for one in one_per_prompt("priority", call.priority, len(prompts))]
        most = one_per_prompt("best_of", call.best_of, len(prompts))
        given_keywords = {**call.keywords, "max_new_tokens": 1} if call.scores_only else call.keywords
        template, keywords = split_keywords(given_keywords, call.chat_template_kwargs, prompts, self.renderer,
                                            own_entries)
        read = SpecReader(model, keywords, self._merges, engine.num_logits)
        planned: list[RequestSpec | Completion] = []
        max_model_len = engine.max_model_len
        for index, prompt in enumerate(self._checked(prompts, template)):
            config = configs[index]
            if isinstance(given[index], Exception):
                prompt = given[index]
            ids = [] if isinstance(prompt, Exception) else prompt.ids
            try:
                if isinstance(prompt, Exception):
                    raise prompt
                if isinstance(adapter := adapters[index], Exception):
                    raise adapter
                if isinstance(form := forms[index], Exception):
                    raise form
                merged = read.merged(config)
                self._notices.look(merged, config, keywords, model.generation_config)
                spec, wanted = self._settled(ids, config, call, read, options[index], salts[index], adapter)
                self._notices.look_at_length(len(ids), spec.max_new_tokens, max_model_len, config, keywords)
                copies = wanted if most[index] is None else num_candidates(most[index], wanted, spec)
                if most[index] is not None and spec.logprobs is None:
                    spec = spec.but(logprobs=PROCESSED)
                if prompt.inputs:
                    spec = with_images(engine, spec, prompt.inputs, _naming_images())
                spec = spec.but(structured=form, priority=priorities[index], autocast=autocast, index=index,
                                best=wanted if copies > wanted else None)
                if (previous := given[index][1]) is not None:
                    if copies > 1 and previous.seed is not None:
                        raise ValueError(f"num_return_sequences={copies!r}: expected 1 for a Completion, which draws "
                                         "on with its own seed; for several ways on give its prompt_token_ids and "
                                         "output_token_ids")
                    spec = spec.but(previous=engine.check_made(spec.prompt, previous, spec))
                first = 0 if own_seeds else len(planned)
                specs = [self._numbered(spec, request_id, seeds[index], first + copy)
                         for copy, request_id in enumerate(copy_ids(request_ids[index], copies))]
            except UnsupportedModelError:
                raise
            except Exception as error:
                if not any(error is one for one in (prompt, adapters[index], forms[index])):
                    if not isinstance(error, (TypeError, ValueError)):
                        raise
                    if config is call.generation_config:  # raises if the error is one of every prompt
                        of_all = options[index] if options[index] is call.options else {}
                        self._settled([0], config, call, read, of_all, None, None)
                failed = call.failed(index, error, ids)
                planned += [failed] * _copies_of(config, keywords, model.generation_config)
            else:
                planned += specs
        return planned

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
        """Start to compile the forms of a call, and return futures; errors are left to `read`."""
        is_one = not isinstance(structured, (list, tuple)) or isinstance(structured, Structured)
        begun = []
        for one in [structured] if is_one else structured:
            with suppress(TypeError, ValueError, ImportError):
                if (read := read_structured(one)) is not None:
                    begun.append(self._engine.begin_grammar(read))
        return begun

    def _checked(self, prompts: list[Any], template: dict[str, Any]) -> Iterable[Prompt | Exception]:
        """Return each prompt with checked token ids, or the exception that says why the prompt cannot run.

        With a processor each is read when it is its turn, so that pixels of one prompt are held at a time.
        """
        renderer = self.renderer
        forms: Iterable[Any] = (_attempt(lambda p: read_prompt(p, renderer, template), one) for one in prompts)
        if self.processor is None:
            forms = list(forms)
            if not any(isinstance(form, Exception) for form in forms):
                with suppress(TypeError, ValueError):
                    return list(map(Prompt, self._engine.check_prompts([form.ids for form in forms])))

        def check(form: Prompt) -> Prompt:
            return Prompt(self._engine.check_prompt(form.ids), form.inputs)

        return (f if isinstance(f, Exception) else _attempt(check, f, (TypeError, ValueError)) for f in forms)

    def _settled(self, ids: list[int], config: GenerationConfig | None, call: Call, read: SpecReader,
                 options: dict[str, Any], salt: Any, adapter: Any) -> tuple[RequestSpec, int]:
        """Return the specification of one prompt's requests, and the number of its completions."""
        spec = read.spec(config, len(ids), options)
        if call.scores_only:
            spec = spec.scoring_only()
        spec = spec.but(prompt=ids, cache_salt=salt_digest(salt), adapter_name=adapter)
        copies = num_copies(read.merged(config).num_return_sequences)
        if copies > 1 and not spec.do_sample:
            raise ValueError(f"num_return_sequences={copies!r}: expected 1, or more with do_sample=True")
        self._engine.stop_rule(spec, ids)
        return spec, copies

    def _numbered(self, spec: RequestSpec, request_id: str | None, seed: Any, number: int) -> RequestSpec:
        """Return one request of a prompt's, with its own id, seed and stop rule."""
        seed = derive_seed(base_seed(seed, self._engine.config.seed), number)
        if spec.previous is not None and spec.previous.seed is not None:
            seed = spec.previous.seed
        return spec.but(request_id=request_id, seed=seed, stop=self._engine.stop_rule(spec, spec.prompt))


def runnable(planned: list[RequestSpec | Completion]) -> list[RequestSpec]:
    return [one for one in planned if isinstance(one, RequestSpec)]


def numbered(call: Call, planned: list[RequestSpec | Completion],
             added: list[str | ValueError]) -> tuple[dict[str, int], list[tuple[int, StepOutput]]]:
    """Return the index of each added request's completion by request id, and the outputs of all other completions.

    ``added`` is the result of `Engine.add_all` for `runnable`. With ``on_error="raise"`` a refused request raises.
    """
    index: dict[str, int] = {}
    refused: list[tuple[int, StepOutput]] = []
    answers = iter(added)
    for number, one in enumerate(planned):
        if isinstance(one, Completion):
            refused.append((number, refused_output(one)))
        elif isinstance(answer := next(answers), str):
            index[answer] = number
        else:  # `Engine.add` refused the request, for settings that the device's tables cannot hold for instance
            refused.append((number, refused_output(call.failed(one.index, answer, one.prompt))))
    return index, refused


def refused_output(completion: Completion) -> StepOutput:
    """Return the only output of a prompt that never became a request; its request id is empty."""
    return StepOutput("", [], None, completion.finish_reason, completion)


def error_text(error: Exception) -> str:
    """Return the text of an exception in `Completion.error`."""
    return f"{type(error).__name__}: {_shortened(str(error))}"


@contextmanager
def _naming_images() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"its images cannot run: {error_text(error)}") from error


def _shortened(text: str) -> str:
    """Return a text without its middle if it is long: transformers' errors quote whole images."""
    return text if len(text) <= MOST_OF_ERROR else f"{text[: MOST_OF_ERROR // 2]} ... {text[-MOST_OF_ERROR // 2 :]}"


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


def best_outputs(planned: Sequence[RequestSpec | Completion], made: list[StepOutput]) -> list[StepOutput]:
    """Return the requested number of each prompt's candidates, best first by `Completion.cumulative_logprob`.

    A candidate that failed, or whose log-probabilities are unknown, comes after the others. ``planned`` is grouped by
    prompt, and ``made`` are the last outputs.
    """
    chosen: list[StepOutput] = []
    ranked = [(one.index, one.best) if isinstance(one, RequestSpec) else (None, None) for one in planned]
    for (_, best), group in groupby(zip(ranked, made, strict=True), key=itemgetter(0)):
        outputs = [output for _, output in group]
        chosen += outputs if best is None else sorted(outputs, key=_rank)[:best]  # stable
    return chosen


def _rank(output: StepOutput) -> tuple[bool, float]:
    completion = output.completion
    assert completion is not None
    known = completion.cumulative_logprob
    ended_early = completion.finish_reason in ("error", "abort", "timeout")
    return ended_early or known is None, 0.0 if known is None else -known


def num_candidates(best_of: Any, wanted: int, spec: RequestSpec) -> int:
    """Return the number of candidates for ``wanted`` completions; a ValueError or TypeError names `best_of`."""
    require_int("best_of", best_of, 1)
    if not wanted <= best_of <= MOST_COPIES:
        raise ValueError(f"best_of={best_of!r}: expected at least num_return_sequences={wanted}, at most {MOST_COPIES}")
    if best_of > 1 and not spec.do_sample:
        raise ValueError(f"best_of={best_of!r}: expected 1, or more with do_sample=True")
    return best_of
