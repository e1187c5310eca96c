"""The keywords of requests and of calls, with their types and their documentation.

Public methods take them as ``**keywords: Unpack[...]``, which type checkers read; `with_keywords` shows them in
`help` and `inspect.signature` as well.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

from hf_paged.options.request_spec import PLAIN

F = TypeVar("F", bound=Callable[..., Any])


class RequestKeywords(TypedDict, total=False):
    """The keywords of one request besides a `GenerationConfig`.

    Args:
        seed: seed of the random numbers, in [0, 2**63); in a generator's call one for the call, or one per prompt. None
            means the config's `seed`, else one drawn from torch's default generator.
        logprobs: fill in this field of the `Completion`. "processed" or True: log p of each token under the
            distribution from which it was drawn, behind all logits processors (temperature, filters, penalties).
            "raw": log p under the model's own logits. An integer k in [0, 128]: "processed" with ``top_logprobs=k``.
            This argument and the next ones up to ``priority`` are one value for a generator's call, or a list with one
            per prompt (for ``stop_token_ids`` a list of lists); not for tensors.
        top_logprobs: fill in this field of the `Completion` with this many of the likeliest tokens, in [0, 128], of
            the kind of ``logprobs``, which must be given, too.
        prompt_logprobs: fill in this field of the `Completion`. A prompt that is scored is computed as a whole: it
            fills the prefix cache and does not read it. An integer k in [0, 128]: fill in ``prompt_top_logprobs`` with
            the k likeliest, too. With ``max_new_tokens=0`` no token is generated.
        presence_penalty, frequency_penalty: in [-2, 2], as OpenAI and vLLM define them: before temperature, the score
            of each token that was generated so far is reduced once by the first, and per occurrence by the second.
        stop_token_ids: tokens that end the request with ``finish_reason="stop"``; barred by a least length like EOS.
        include_stop_str_in_output: False leaves the end out of `Completion.text` (a stop string and all behind it, a
            stop token, EOS). `token_ids` contain it in any case.
        skip_special_tokens: leave special tokens out of `Completion.text`.
        timeout: seconds from now after which the request ends with ``finish_reason="timeout"``, before the next step,
            whether it has a token or not.
        on_weight_change: replaces the config's for this request.
        priority: lower runs earlier; equal ones in order of arrival.
        cache_salt: the request shares cached prefixes, in this and in other calls, only with requests of the same salt
            (or, for None, of none); in a generator's call one for the call, or one per prompt.
        structured: the form that the output must have (docs/structured.md): a dict with one of ``json_schema`` (a
            dict, a JSON text, True for any JSON, or a pydantic model), ``regex``, ``choice`` (a list of texts) and
            ``grammar`` (EBNF). Needs a tokenizer and the package xgrammar. In a generator's call one for the call, or
            one per prompt.
    """

    seed: int | Sequence[int] | None
    logprobs: bool | int | str | Sequence[bool | int | str]
    top_logprobs: int | Sequence[int | None] | None
    prompt_logprobs: bool | int | Sequence[bool | int]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    stop_token_ids: Sequence[int] | Sequence[Sequence[int] | None] | None
    include_stop_str_in_output: bool | Sequence[bool]
    skip_special_tokens: bool | Sequence[bool]
    timeout: float | Sequence[float | None] | None
    on_weight_change: str | Sequence[str | None] | None
    priority: int | Sequence[int]
    cache_salt: str | Sequence[str | None] | None
    structured: dict[str, Any] | Sequence[dict[str, Any] | None] | None


class EngineKeywords(RequestKeywords, total=False):
    """The further keywords of `Engine.add_request`.

    Args:
        request_id: an id that is not in use; None has the engine make one.
        max_new_tokens: replaces the config's. 0 generates no token, and needs ``prompt_logprobs``.
        adapter_name: the LoRA adapter of this request, or "__base__" for none. None means the adapters that are active
            in the model. If the adapter is removed before the end, or adapters are merged, the request ends with
            ``finish_reason="error"``.
    """

    request_id: str | None
    max_new_tokens: int | None
    adapter_name: str | None


class StreamKeywords(RequestKeywords, total=False):
    """The further keywords of all calls of a generator.

    Args:
        adapter_names: the LoRA adapter of a prompt, or "__base__" for none: one for the call, or one per prompt. None
            means the adapters that are active in the model. If a prompt's adapter is removed before its end, or
            adapters are merged, the prompt ends with ``finish_reason="error"``.
        on_error: what happens to a prompt that cannot run (too long, empty, ids outside the vocabulary, refused by the
            chat template, with invalid settings of its own). "raise": an error that names its index is raised, and
            nothing runs. "complete": its completions (all ``num_return_sequences``) end with ``finish_reason="error"``
            and the message in `Completion.error`; other prompts run.
        chat_template_kwargs: keywords of ``tokenizer.apply_chat_template`` for prompts that are chats; they override
            ``generate_kwargs``. A keyword that the template does not read is refused.
        request_ids: ids by which `cancel` finds a prompt while the call runs; one per prompt, none of them in use.
    """

    adapter_names: str | Sequence[str | None] | None
    on_error: str
    chat_template_kwargs: dict[str, Any] | None
    request_ids: str | Sequence[str | None] | None


class CallKeywords(StreamKeywords, total=False):
    """The further keyword of calls of a generator that return completions.

    Args:
        best_of: generate this many completions of a prompt, and return the ``num_return_sequences`` of them with the
            largest `Completion.cumulative_logprob`, best first. Fills in their ``logprobs``, and needs
            ``do_sample=True``. One for the call, or one per prompt; not for tensors.
    """

    best_of: int | Sequence[int | None] | None


class GenerateKeywords(CallKeywords, total=False):
    """The further keywords of a generator's calls that type checkers accept: options of a `GenerationConfig`, common
    keywords of chat templates, and inputs of `model.generate`. Other keywords of a template go into
    ``chat_template_kwargs``."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    eos_token_id: Any
    pad_token_id: int | None
    num_return_sequences: int | None
    prompt_lookup_num_tokens: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    sequence_bias: Any
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Any
    forced_bos_token_id: int | None
    forced_eos_token_id: Any
    remove_invalid_values: bool | None
    exponential_decay_length_penalty: Any
    suppress_tokens: Any
    begin_suppress_tokens: Any
    renormalize_logits: bool | None
    tools: Any
    documents: Any
    chat_template: str | None
    continue_final_message: bool
    add_generation_prompt: bool
    enable_thinking: bool | None
    input_ids: Any
    attention_mask: Any


DEFAULTS: dict[str, Any] = {**PLAIN, "priority": 0, "on_error": "raise"}  # of others: None

# Arguments of `PagedGenerator.generate` that are about a call, besides those in `PLAIN`, the prompts and the config.
OF_CALL = tuple(name for name in CallKeywords.__annotations__ if name not in PLAIN)


def names_of(keywords: type) -> tuple[str, ...]:
    """Return the keys of a TypedDict, with the keys of its bases first."""
    return tuple(keywords.__annotations__)


def with_keywords(keywords: type, others: str = "") -> Callable[[F], F]:
    """Return a decorator that shows the keys of a TypedDict as the keyword arguments of a function.

    The line ``**keywords: ...`` of the function's docstring is replaced by the documentation of the TypedDict.

    Args:
        others: the name of the function's further keywords; "" for none.
    """
    kind = inspect.Parameter

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not kind.VAR_KEYWORD]
        annotations = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
        own += [kind(name, kind.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
                for name, hint in annotations.items()]
        if others:
            own.append(kind(others, kind.VAR_KEYWORD, annotation="Any"))
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        if (line := re.search(r"^( *)\*\*keywords: .*\n", function.__doc__ or "", re.MULTILINE)) is not None:
            text = "".join(f"{line[1]}{one}\n" for one in _documentation(keywords))
            function.__doc__ = (function.__doc__ or "").replace(line[0], text)
        return function

    return decorate


def _documentation(keywords: type) -> list[str]:
    """Return the lines of ``Args:`` of a TypedDict and of its bases."""
    lines: list[str] = []
    for one in (RequestKeywords, EngineKeywords, StreamKeywords, CallKeywords):
        if set(names_of(one)) <= set(names_of(keywords)):
            arguments = inspect.cleandoc(one.__doc__ or "").partition("Args:\n")[2]
            lines += [line[4:] for line in arguments.splitlines()]
    return lines


def check_keywords(keywords: type, given: dict[str, Any], function: str) -> None:
    """Raise TypeError for a keyword that is no key of the TypedDict, as Python does, and say what is accepted."""
    for name in given:
        if name not in keywords.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: expected one of "
                            f"{', '.join(names_of(keywords))}")
