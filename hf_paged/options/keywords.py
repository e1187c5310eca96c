"""The keywords of requests and of calls, each with its type and its documentation in one place.

Public methods take them as ``**keywords: Unpack[...]``, which type checkers read; `with_keywords` shows them in
`help` and `inspect.signature` as well.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

from hf_paged.options.request_options import RequestOptions

F = TypeVar("F", bound=Callable[..., Any])


class RequestKeywords(TypedDict, total=False):
    """What one request asks for besides a `GenerationConfig`.

    Args:
        seed: of the random numbers, in [0, 2**63); in a generator's call one for the call, or one per prompt. None: the
            config's `seed`, else drawn from torch's default generator.
        logprobs: fill in this field of the `Completion`. "processed", or True: log p of each token under the
            distribution that it was drawn from, behind all logits processors (temperature, filters, penalties).
            "raw": from the model's logits as they are. An integer k in [0, 128]: "processed" with ``top_logprobs=k``.
            This argument and those down to ``priority``: in a generator's call one for the call, or a list with one per
            prompt (of ``stop_token_ids`` a list of lists); not for tensors.
        top_logprobs: fill in this field of the `Completion` with this many of the likeliest tokens, in [0, 128], of
            the kind that ``logprobs`` says, which has to be asked for.
        prompt_logprobs: fill in this field. A prompt that is scored is computed as a whole: it fills the prefix cache
            and does not read it. An integer k in [0, 128]: ``prompt_top_logprobs`` with the k likeliest, too. With
            ``max_new_tokens=0`` nothing is generated.
        presence_penalty, frequency_penalty: in [-2, 2], as OpenAI and vLLM define them: before temperature, the score
            of each token that was generated so far loses the first once, and the second as often as it was.
        stop_token_ids: tokens that end the request as ``finish_reason="stop"``; barred by a least length like EOS.
        include_stop_str_in_output: False: `Completion.text` leaves out what ended it (a stop string and all behind it,
            a stop token, EOS). `token_ids` hold it in any case.
        skip_special_tokens: in `Completion.text`.
        timeout: seconds from now after which the request ends with ``finish_reason="timeout"``, before the next step,
            whether it has a token or not.
        on_weight_change: in place of the config's, for this request.
        priority: lower runs earlier; equal ones in order of arrival.
        cache_salt: cached prefixes are shared among requests of the same salt alone (None: those without one), in this
            and in other calls; in a generator's call one for the call, or one per prompt.
        structured: the form that the output has to have (docs/structured.md): a dict with one of ``json_schema`` (a
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
    """What `Engine.add_request` takes besides.

    Args:
        request_id: None: one is made. Must not be in use.
        max_new_tokens: in place of the config's. 0: nothing is generated, with ``prompt_logprobs`` alone.
        adapter_name: of the LoRA adapter that this request runs with, or "__base__" for none at all. None: those that
            are active in the model. Where the model loses the adapter before the end, or merges adapters, the request
            ends with ``finish_reason="error"``.
    """

    request_id: str | None
    max_new_tokens: int | None
    adapter_name: str | None


class StreamKeywords(RequestKeywords, total=False):
    """What the calls of a generator take besides.

    Args:
        adapter_names: of the LoRA adapter that a prompt runs with, or "__base__" for none at all: one for the call, or
            one per prompt. None: those that are active in the model. A prompt whose adapter the model loses before its
            end, or whose model merges adapters, ends with ``finish_reason="error"``.
        on_error: what becomes of a prompt that cannot run (too long, empty, ids outside the vocabulary, refused by the
            chat template, with settings of its own that are wrong). "raise": an error that names its index, and nothing
            runs. "complete": its completions (each of ``num_return_sequences``) end with ``finish_reason="error"`` and
            the message in `Completion.error`; the others run.
        chat_template_kwargs: keywords of ``tokenizer.apply_chat_template`` for prompts that are chats, whatever their
            names; they win over those in ``generate_kwargs``. What the template does not read is refused.
        request_ids: by which `cancel` finds a prompt while the call runs; one per prompt, none of them in use.
    """

    adapter_names: str | Sequence[str | None] | None
    on_error: str
    chat_template_kwargs: dict[str, Any] | None
    request_ids: str | Sequence[str | None] | None


class CallKeywords(StreamKeywords, total=False):
    """What the calls of a generator take that return completions.

    Args:
        best_of: of this many completions of a prompt, the ``num_return_sequences`` best are returned, best first: those
            of the largest `Completion.cumulative_logprob`. It fills in their ``logprobs``, and wants
            ``do_sample=True``. One for the call, or one per prompt; not for tensors.
    """

    best_of: int | Sequence[int | None] | None


class GenerateKeywords(CallKeywords, total=False):
    """What type checkers accept of a generator's calls besides: options of a `GenerationConfig`, common keywords of
    chat templates, and what `model.generate` takes with tensors. Others of a template go into
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


DEFAULTS: dict[str, Any] = {**RequestOptions._field_defaults, "priority": 0, "on_error": "raise"}  # of others: None

# Arguments of `PagedGenerator.generate` that are about a call, besides `RequestOptions`, the prompts and the config.
OF_CALL = tuple(name for name in CallKeywords.__annotations__ if name not in RequestOptions._fields)


def names_of(keywords: type) -> tuple[str, ...]:
    """The keys of a TypedDict, those of its bases first."""
    return tuple(keywords.__annotations__)


def with_keywords(keywords: type, others: str = "") -> Callable[[F], F]:
    """A decorator that shows the keys of a TypedDict as the keyword arguments of a function.

    The line ``**keywords: ...`` of the function's docstring is replaced by what the TypedDict says of them.

    Args:
        others: the name of further keywords that the function takes; "" for none.
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
    """The lines of ``Args:`` of a TypedDict and of those that it extends."""
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
