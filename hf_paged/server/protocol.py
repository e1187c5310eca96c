"""Bodies of the API's requests: the fields of each endpoint, and the values that each field takes.

A value that a field does not take raises an error with the field, the value and what is accepted, so that no field is
ignored silently. A field's ``description`` says what is accepted; docs/server_fields.md shows these texts.
"""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import core_schema
from transformers import GenerationConfig

from hf_paged.options.chat_keywords import OURS
from hf_paged.options.request_spec import MOST_PENALTY, changed
from hf_paged.options.structured import Structured
from hf_paged.options.table import DRAWS, share
from hf_paged.server.errors import RefusedRequestError, blaming, refusal
from hf_paged.server.structured import (
    EXPECTED_FORMAT,
    EXPECTED_GUIDED,
    EXPECTED_OUTPUTS,
    EXPECTED_TEXT,
    guided,
    read_format,
    read_outputs,
    read_text_format,
)
from hf_paged.server.tools import (
    ANY_CHOICE,
    EXPECTED_CHOICE,
    EXPECTED_TOOLS,
    ToolChoice,
    function_of,
    nested,
    read_choice,
    read_tools,
)

MOST_CHOICES = 128
MOST_STOPS = 256  # each is looked for behind each token of each choice, by a step that other requests share
LEAST_LENGTH = 1024  # new tokens of a request that sets no length, if the model's own config has fewer
_FLOAT32 = (2.0**-149, (2 - 2**-23) * 2.0**127)  # smallest positive and largest finite value
_MOST = 2**63 - 1
EXPECTED_MESSAGES = ("expected a list of objects, each with a role and a content (text, or a list of parts with their "
                     "type)")
EXPECTED_INPUT = "expected a string, or a list of messages and items of the Responses API"
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class NoEffect:
    """Annotation of a field that the server does not carry out.

    Args:
        passes: the values without an effect, which are accepted.
        expected: the error text for all other values.
    """

    def __init__(self, *passes: Any, expected: str) -> None:
        self.passes, self.expected = passes, expected

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"description": self.expected, "no_effect": list(self.passes)}

    def _check(self, value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in self.passes):
            raise ValueError
        return value


# -- readers of values ------------------------------------------------------------------------------------------------

# Chat-template keywords that the server, or another body field, already sets.
_NOT_KEYWORDS = frozenset({*OURS, "add_generation_prompt", "conversation", "load_audio_from_video", "tools"})


def _keywords(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not _NOT_KEYWORDS.isdisjoint(value):
        raise ValueError
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError
        content = message.get("content") or []
        if not isinstance(content, str) and not (isinstance(content, list) and all(map(_is_part, content))):
            raise ValueError
    return value


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _as_list(value: Any) -> Any:
    """Return a list of prompts for one text, or for the token ids of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if is_one else value


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if (not isinstance(texts, list) or len(texts) > MOST_STOPS
            or not all(isinstance(text, str) and text for text in texts)):
        raise ValueError
    return tuple(texts)


def _suffix(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # raises ValueError for a lone surrogate, which no answer can hold
    return value


# -- the fields; None means that a body does not set a field ----------------------------------------------------------

_FLAG, _TEXT = "expected true or false", "expected a string"
_LABEL = "expected a string, which changes no answer"
_NOT_STORED = "the server keeps no answers"
_LEFT_OUT = "expected it left out: "
_NO_TOOLS_OF_ITS_OWN = f"{_LEFT_OUT}the server runs no tools"
_TEXT_ONLY = f"{_LEFT_OUT}answers are text"
_NO_CHECKS = f"{_LEFT_OUT}the server checks no content"
_WHOLE_INPUT = f"expected the whole conversation as input: {_NOT_STORED}"
_EXPECTED_KEYWORDS = ("expected an object of names that the model's chat template refers to, without "
                      f"{', '.join(sorted(_NOT_KEYWORDS))}")

Flag = Annotated[bool | None, Field(description=_FLAG)]
Text = Annotated[str | None, Field(description=_TEXT)]
Label = Annotated[str | None, Field(description=_LABEL)]
Length = Annotated[int | None, Field(ge=1, le=_MOST, description="expected an integer of at least 1")]
Penalty = Annotated[float | None, Field(ge=-MOST_PENALTY, le=MOST_PENALTY, description="expected a number in [-2, 2]")]
Share = Annotated[float | None, Field(ge=0, le=1, description="expected a number in [0, 1]")]
UpTo20 = Annotated[int | None, Field(ge=0, le=20, description="expected an integer in [0, 20]: the number of likeliest "
                                                              "tokens to return at the place of each token")]
_Digits = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,18})$")]
_Prompt = Annotated[str | list[int], Field(min_length=1)]
Tools = Annotated[list[dict[str, Any]], PlainValidator(read_tools), Field(description=EXPECTED_TOOLS)]
Choice = Annotated[ToolChoice, PlainValidator(read_choice), Field(description=EXPECTED_CHOICE)]


class Fields(BaseModel):
    """Fields of a body, or of an object in it; null means the same as an absent field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class StreamOptions(Fields):
    """How a stream of the Responses API looks."""

    include_obfuscation: Annotated[Any, NoEffect(False, expected="expected false")] = None


class CompletionStreamOptions(StreamOptions):
    """How a stream of the other endpoints looks; with ``include_usage`` a chunk that has the usage alone ends it."""

    include_usage: bool = False


class Reasoning(Fields):
    """The reasoning that a body of the Responses API requests."""

    effort: str | None = None


# Filters of the option table whose values are shares, as top_p.
_FILTERS = tuple(option.name for option in DRAWS if option.draws is share)
_fields: dict[str, Any] = dict.fromkeys(_FILTERS, (Share, None))
_Filters: Any = create_model("_Filters", __base__=Fields, **_fields)


class RequestBody(_Filters):
    """The fields of all endpoints."""

    endpoint: ClassVar[str]
    most_choices: ClassVar[int] = 1

    model: Text = None
    stream: Flag = None
    generation_config: Annotated[str | None, Field(
        description="expected a string that holds a JSON object of GenerationConfig fields")] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=_MOST, description="expected an integer of at least 0")] = None
    temperature: Annotated[float | None, Field(ge=0, description="expected a number of at least 0")] = None
    top_k: Annotated[int | None, Field(
        ge=-1, lt=2**31, description="expected an integer of at least 1, or 0 or -1 for all tokens")] = None
    repetition_penalty: Annotated[float | None, Field(
        ge=_FLOAT32[0], le=_FLOAT32[1], description="expected a number above 0 that float32 holds")] = None
    seed: Annotated[int | None, Field(
        ge=-(2**63), le=_MOST, description="expected an integer in [-2**63, 2**63)")] = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=_MOST)]] | None, Field(
        description="expected a list of token ids")] = None
    ignore_eos: Flag = None
    user: Label = None

    # -- what the fields come to; an endpoint without a field has the value of a body that leaves it out

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of an answer; of two fields the newer one counts."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        return next((value for name in names if (value := getattr(self, name, None)) is not None), None)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return getattr(self, "stop", ())

    @property
    def keeps_stop(self) -> bool:
        """Whether an answer ends with its stop text."""
        return bool(getattr(self, "include_stop_str_in_output", None))

    @property
    def cuts_stop(self) -> bool:
        """Whether a stop text is left out of the answer that it ends."""
        return bool(self.stop_texts) and not self.keeps_stop

    @property
    def bias(self) -> dict[int, float]:
        """Numbers that are added to the logits of tokens."""
        return {int(token): number for token, number in getattr(self, "logit_bias", {}).items()}

    @property
    def form(self) -> tuple[str, Structured] | None:
        """The field that requests a form of the answer, and the form."""
        return next(iter(self._forms()), None)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, in the format of the chat endpoint."""
        return []

    def options(self) -> dict[str, Any]:
        """Return the options of `PLAIN` that the body gives, which a `GenerationConfig` cannot hold."""
        return {}

    def _forms(self) -> list[tuple[str, Structured]]:
        return [(name, value) for name in _FORMS if isinstance(value := getattr(self, name, None), Structured)]

    def num_choices(self, config: GenerationConfig) -> int:
        """Return the number of choices, and clear `num_return_sequences` of `config`, which means the same.

        An invalid number is left for `generate` to reject.
        """
        count, beams = config.num_return_sequences, config.num_beams
        if self.generation_config is None or type(count) is not int or count < 2 or not (
                config.do_sample or (isinstance(beams, int) and beams > 1)):
            return getattr(self, "n", None) or 1
        most = self.most_choices if beams in (None, 1) else 1
        if count > most:
            raise RefusedRequestError(f"num_return_sequences={count}: expected at most {most} here")
        config.num_return_sequences = None
        return getattr(self, "n", None) or count

    def config(self, of_model: GenerationConfig) -> GenerationConfig:
        """Return the settings of the request.

        Args:
            of_model: the model's own settings, which count where the body has no `generation_config`.

        Raises:
            RefusedRequestError: `generation_config` cannot be read, has a name that no config has, or contradicts
                another field; or the minimum length exceeds the maximum length.
        """
        config = self._base(of_model)
        if self.max_new_tokens is not None:
            config.max_new_tokens = self.max_new_tokens
        if self.min_tokens is not None:
            config.min_new_tokens = self.min_tokens
        if self.repetition_penalty is not None:
            config.repetition_penalty = self.repetition_penalty
        if self.bias:
            config.sequence_bias = {(token,): number for token, number in self.bias.items()}
        if self.stop_texts:
            config.stop_strings = list(self.stop_texts)
        self._set_sampling(config)
        self._set_ends(config, of_model)
        most = config.max_new_tokens
        if self.min_tokens is not None and isinstance(most, int) and self.min_tokens > most:
            raise refusal("min_tokens", self.min_tokens, f"expected at most {most}, the length of the answer")
        return config

    def _base(self, of_model: GenerationConfig) -> GenerationConfig:
        if self.generation_config is None:
            config = copy.deepcopy(of_model)
            config.max_new_tokens = max(config.max_new_tokens or 0, LEAST_LENGTH)
            return config
        expected = EXPECTED[type(self)]["generation_config"]
        with blaming(f"generation_config={self.generation_config!r:.200}: {expected}"):
            config = GenerationConfig(**json.loads(self.generation_config))
        if unknown := set(vars(config)) - set(vars(GenerationConfig())) - set(vars(of_model)):
            raise RefusedRequestError("generation_config: expected names of a GenerationConfig, not "
                                      f"{min(unknown)!r:.200}")
        if isinstance(config.stop_strings, list) and len(config.stop_strings) > MOST_STOPS:
            raise RefusedRequestError(f"generation_config: expected up to {MOST_STOPS} stop_strings, not "
                                      f"{len(config.stop_strings)}")
        for name, of_config, is_given in (("logit_bias", "sequence_bias", bool(self.bias)),
                                          ("stop", "stop_strings", bool(self.stop_texts))):
            if is_given and getattr(config, of_config) not in (None, getattr(of_model, of_config, None)):
                raise RefusedRequestError(f"{name}: expected no {of_config} in generation_config beside it")
        return config

    def _set_sampling(self, config: GenerationConfig) -> None:
        filters = {name: value for name in _FILTERS if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            filters["top_k"] = max(self.top_k, 0)
        if self.temperature is not None or any(value != _OFF.get(name) for name, value in filters.items()):
            config.do_sample = self.temperature != 0
        if self.temperature:
            config.temperature = self.temperature
        if config.do_sample:
            for name, value in filters.items():
                setattr(config, name, value)
            if config.top_k is None:
                config.top_k = 0  # generate would use its default of 50

    def _set_ends(self, config: GenerationConfig, of_model: GenerationConfig) -> None:
        if not self.ignore_eos and not self.stop_token_ids:
            return
        present = config.eos_token_id if config.eos_token_id is not None else of_model.eos_token_id
        eos = [] if self.ignore_eos or present is None else present if isinstance(present, list) else [present]
        config.eos_token_id = [*eos, *(self.stop_token_ids or ())] or -1
        if config.eos_token_id == -1:
            config.min_new_tokens = None  # without EOS the processor of the minimum length has no effect

    def check(self, given: dict[str, Any]) -> None:
        """Raise RefusedRequestError for fields of a body, ``given`` as it came, that contradict each other."""
        if len(forms := [name for name, _ in self._forms()]) > 1:
            raise refusal(forms[1], given[forms[1]], f"expected it left out beside {forms[0]}")
        if getattr(self, "stream_options", None) is not None and not self.stream:
            raise refusal("stream_options", given["stream_options"], "expected stream to be true with it")


_guided: dict[str, Any] = {f"guided_{kind}": (Annotated[Structured | None, PlainValidator(guided(kind)), Field(
    description=expected)], None) for kind, expected in EXPECTED_GUIDED.items()}
_Guided: Any = create_model("_Guided", __base__=Fields, **_guided)


class CompletionBody(RequestBody, _Guided):
    """The fields of the chat and the completions endpoint."""

    most_choices: ClassVar[int] = MOST_CHOICES

    max_tokens: Length = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[dict[_Digits, Annotated[float, Field(ge=-100, le=100)]], Field(
        default_factory=dict, description="expected an object of token ids in digits with numbers in [-100, 100]")]
    stop: Annotated[tuple[str, ...], PlainValidator(_stop), Field(
        description=f"expected a string or a list of up to {MOST_STOPS} strings, none of them empty")] = ()
    include_stop_str_in_output: Flag = None
    n: Annotated[int | None, Field(
        ge=1, le=MOST_CHOICES, description=f"expected an integer in [1, {MOST_CHOICES}]")] = None
    stream_options: Annotated[CompletionStreamOptions | None, Field(
        description="expected an object with include_usage as true or false")] = None
    structured_outputs: Annotated[Structured | None, PlainValidator(read_outputs), Field(
        description=EXPECTED_OUTPUTS)] = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer has log-probabilities of its tokens."""
        given = getattr(self, "logprobs", None)
        return given is not None and given is not False

    @property
    def num_likeliest(self) -> int:
        """How many of the likeliest tokens come with each token; the completions endpoint has one field for both."""
        return getattr(self, "top_logprobs", getattr(self, "logprobs", None)) or 0

    def options(self) -> dict[str, Any]:
        given = {"logprobs": self.with_logprobs, "top_logprobs": self.num_likeliest or None,
                 "presence_penalty": self.presence_penalty or 0.0, "frequency_penalty": self.frequency_penalty or 0.0}
        return {name: given[name] for name in changed(given)}


class ConversationBody(RequestBody):
    """The fields of the chat and the responses endpoint."""

    tools: Tools = Field(default_factory=list)
    tool_choice: Choice = ANY_CHOICE
    parallel_tool_calls: Annotated[bool, Field(description=_FLAG)] = True
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    moderation: Annotated[Any, NoEffect(expected=_NO_CHECKS)] = None
    metadata: Annotated[Any, NoEffect({}, expected=f"{_LEFT_OUT}{_NOT_STORED}")] = None
    store: Annotated[Any, NoEffect(False, expected=f"expected false: {_NOT_STORED}")] = None
    service_tier: Annotated[Any, NoEffect(
        "auto", "default", expected="expected 'auto' or 'default': every request is served alike")] = None
    prompt_cache_options: Annotated[Any, NoEffect(
        {}, expected=f"{_LEFT_OUT}prefixes are cached as long as there is room")] = None
    prompt_cache_retention: Annotated[Any, NoEffect(
        "in_memory", "in-memory", expected="expected 'in_memory'")] = None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        return nested(self.tools) if self.tool_choice.may_call else []

    @property
    def effort(self) -> str | None:
        """The effort of reasoning, a variable of the chat template."""
        return getattr(self, "reasoning_effort", None)

    @property
    def template_keywords(self) -> dict[str, Any]:
        """The keywords for the chat template."""
        return getattr(self, "chat_template_kwargs", {})

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        must_call, names = self.tool_choice.must_call, [function_of(tool)["name"] for tool in self.tools]
        if self.callable_tools and not self.parallel_tool_calls and must_call is None:
            raise refusal("parallel_tool_calls", False, "expected true with tools, unless tool_choice says that one "
                                                        "has to be called")
        if must_call is not None and not names:
            raise refusal("tool_choice", given["tool_choice"], "expected tools beside it, one of which is to be called")
        if must_call and must_call not in names:
            raise refusal("tool_choice", given["tool_choice"],
                          f"expected the name of one of the tools, {', '.join(names)}")
        if self.form is not None and self.callable_tools:
            raise refusal(self.form[0], given[self.form[0]], "expected it left out beside tools that may be called "
                                                             "(tool_choice 'none': they are not)")


class ChatBody(CompletionBody, ConversationBody):
    """The fields of `/v1/chat/completions`."""

    endpoint: ClassVar[str] = "chat"

    messages: Annotated[list[dict[str, Any]], PlainValidator(_messages), Field(description=EXPECTED_MESSAGES)]
    max_completion_tokens: Length = None
    logprobs: Flag = None
    top_logprobs: UpTo20 = None
    response_format: Annotated[Structured | None, PlainValidator(read_format), Field(
        description=EXPECTED_FORMAT)] = None
    reasoning_effort: Text = None
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_keywords), Field(
        description=_EXPECTED_KEYWORDS)] = Field(default_factory=dict)
    verbosity: Annotated[Any, NoEffect("medium", expected="expected 'medium', which is no wish")] = None
    functions: Annotated[Any, NoEffect([], expected="expected tools in its place")] = None
    function_call: Annotated[Any, NoEffect("none", "auto", expected="expected tool_choice in its place")] = None
    audio: Annotated[Any, NoEffect(expected=_TEXT_ONLY)] = None
    modalities: Annotated[Any, NoEffect(["text"], expected="expected ['text']: answers are text")] = None
    prediction: Annotated[Any, NoEffect(expected=f"{_LEFT_OUT}there is no speculative decoding of it")] = None
    web_search_options: Annotated[Any, NoEffect(expected=_NO_TOOLS_OF_ITS_OWN)] = None

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        if self.num_likeliest and not self.logprobs:
            raise refusal("top_logprobs", self.top_logprobs, "expected logprobs to be true with it")


class TextBody(CompletionBody):
    """The fields of `/v1/completions`."""

    endpoint: ClassVar[str] = "text"

    prompt: Annotated[list[_Prompt], BeforeValidator(_as_list), Field(min_length=1), Field(
        description="expected a text or a list of token ids, or a list of such prompts, none of them empty")]
    suffix: Annotated[str | None, PlainValidator(_suffix), Field(description=_TEXT)] = None
    echo: Flag = None
    best_of: Annotated[int | None, Field(
        ge=1, le=_MOST, description="expected it to be n: choices are not ranked")] = None
    logprobs: UpTo20 = None

    def options(self) -> dict[str, Any]:
        scored = {"prompt_logprobs": self.num_likeliest} if self.echo and self.with_logprobs else {}
        return {**super().options(), **scored}

    def check(self, given: dict[str, Any]) -> None:
        super().check(given)
        if self.best_of not in (None, self.n or 1):
            raise refusal("best_of", self.best_of, EXPECTED[type(self)]["best_of"])
        if self.echo and self.with_logprobs and self.stream:
            raise refusal("echo", True, "expected false in a stream with logprobs")


class ResponsesBody(ConversationBody):
    """The fields of `/v1/responses`."""

    endpoint: ClassVar[str] = "responses"

    input: Annotated[str | list[Any], Field(min_length=1, description=EXPECTED_INPUT)]
    instructions: Text = None
    max_output_tokens: Length = None
    text: Annotated[Structured | None, PlainValidator(read_text_format), Field(description=EXPECTED_TEXT)] = None
    reasoning: Annotated[Reasoning | None, Field(description="expected an object with nothing but an effort")] = None
    stream_options: Annotated[StreamOptions | None, Field(description="expected include_obfuscation as false")] = None
    top_logprobs: Annotated[int | None, Field(
        ge=0, le=0, description="expected 0: this endpoint gives no log-probabilities")] = None
    image: Annotated[Any, NoEffect(expected=_TEXT_ONLY)] = None
    max_tool_calls: Annotated[Any, NoEffect(expected=_NO_TOOLS_OF_ITS_OWN)] = None
    access_programs: Annotated[Any, NoEffect([], expected=_NO_CHECKS)] = None
    background: Annotated[Any, NoEffect(False, expected=f"expected false: {_NOT_STORED}")] = None
    background_options: Annotated[Any, NoEffect({}, expected=f"{_LEFT_OUT}{_NOT_STORED}")] = None
    conversation: Annotated[Any, NoEffect(expected=_WHOLE_INPUT)] = None
    previous_response_id: Annotated[Any, NoEffect(expected=_WHOLE_INPUT)] = None
    prompt: Annotated[Any, NoEffect(expected=f"expected its text as input: {_NOT_STORED}")] = None
    context_management: Annotated[Any, NoEffect([], expected=f"{_LEFT_OUT}inputs are taken as they are")] = None
    truncation: Annotated[Any, NoEffect(
        "disabled", expected="expected 'disabled': inputs are taken as they are")] = None
    include: Annotated[Any, NoEffect(
        [], expected="expected []: an answer has its text, its reasoning and its calls")] = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort


BODIES: tuple[type[RequestBody], ...] = (ChatBody, TextBody, ResponsesBody)
_FORMS = ("response_format", "text", "structured_outputs", *(f"guided_{kind}" for kind in EXPECTED_GUIDED))
B = TypeVar("B", bound=RequestBody)


# What each field of a body accepts.
EXPECTED = {kind: {name: str(field["description"]) for name, field in kind.model_json_schema()["properties"].items()}
            for kind in BODIES}


def read_body(kind: type[B], body: dict[str, Any]) -> B:
    """Parse and check a request body; null means the same as an absent field.

    Raises:
        RefusedRequestError: the endpoint does not have a field, or does not carry out its value.
    """
    for name in body:
        if name not in kind.model_fields:
            raise refusal(name, body[name], "expected one of the fields of this endpoint, "
                                            f"{', '.join(sorted(kind.model_fields))}")
    try:
        read = kind.model_validate(body)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        raise refusal(name, body.get(name), EXPECTED[kind][name]) from None
    read.check(body)
    return read
