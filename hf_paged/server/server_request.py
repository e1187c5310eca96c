"""Checked fields of one request body, and how they change the request's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from hf_paged.options.request_options import RequestOptions
from hf_paged.options.structured import Structured

MOST_CHOICES = 128


@dataclass
class ServerRequest:
    """Parsed request body, filled by `read_body`; a field's default means that the body does not set it.

    Attributes:
        body: Fields that transformers' handler reads.
        settings: Fields that go unchanged into a `GenerationConfig`.
        temperature: None if absent; 0 means greedy.
        filters: `top_k`, `top_p` and `min_p`, which only sampling uses.
        stop: Strings that end an answer and are cut off it, unless `keeps_stop`.
        n: Number of choices of the answer; None if absent.
        has_one_choice: The endpoint supports a single choice only.
        logprobs: Return log-probabilities of the answer's tokens; `top_logprobs`: and of as many likeliest tokens.
        penalties: `presence_penalty` and `frequency_penalty` that are not 0.
        usage_chunk: A stream ends with a chunk that holds the usage alone.
        must_call: Name of the tool that the answer must call; "" for any tool, None if no call is required.
        structured: Structured output of the answer, requested by the body fields in `form_fields`.
    """

    body: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    filters: dict[str, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignores_eos: bool = False
    n: int | None = None
    has_one_choice: bool = False
    best_of: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    penalties: dict[str, float] = field(default_factory=dict)
    has_stream_options: bool = False
    usage_chunk: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call_tools: bool = True
    parallel_calls: bool = True
    must_call: str | None = None
    structured: Structured | None = None
    form_fields: list[str] = field(default_factory=list)
    reasoning_effort: str | None = None

    @property
    def has_tools(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.may_call_tools

    def options(self) -> RequestOptions:
        """Return the engine options that a `GenerationConfig` cannot hold."""
        return RequestOptions(logprobs=self.logprobs, top_logprobs=self.top_logprobs, **self.penalties)

    def of_the_batch(self) -> str | None:
        """Return the first option that works only for requests in the batch, or None."""
        return next(iter([*(["logprobs"] if self.logprobs else []), *self.penalties]), None)

    def for_transformers(self) -> dict[str, Any]:
        """Return the body for transformers' handler."""
        body = dict(self.body)
        if self.has_tools:
            body["tools"] = self.tools
        if self.reasoning_effort is not None:
            body["chat_template_kwargs"] = {**(body.get("chat_template_kwargs") or {}),
                                            "reasoning_effort": self.reasoning_effort}
        return body

    def beyond(self, config: GenerationConfig) -> str | None:
        """Return the first option that one `config` shared by all requests cannot give, or None.

        Length and EOS do not count: each request has its own.
        """
        asked = GenerationConfig(do_sample=config.do_sample, top_k=config.top_k)
        self.apply(asked, config)
        others = {name: value for name, value in vars(asked).items() if value is not None and name not in _EACH_ITS_OWN}
        own = {"n": self.n if self.n != 1 else None, "logprobs": self.logprobs or None, "seed": self.seed,
               **self.penalties, **dict.fromkeys(self.form_fields, self.structured)}
        odd = [name for name, value in others.items() if value != getattr(config, name, None)]
        return next((name for name in [*odd, *own] if name in odd or own[name] is not None), None)

    def apply(self, config: GenerationConfig, of_model: GenerationConfig) -> None:
        """Apply the body's fields to the request's `config`, whose missing fields come from the model's own config.

        Raises:
            ValueError: If `generation_config` contradicts another field or has a name that no config has, or if the
                minimum length exceeds the maximum length.
        """
        self._check_config(config, of_model)
        for name, value in self.settings.items():
            setattr(config, name, value)
        if self.temperature is not None or any(value != _OFF[name] for name, value in self.filters.items()):
            config.do_sample = self.temperature != 0
        if self.temperature:
            config.temperature = self.temperature
        if config.do_sample:
            for name, value in self.filters.items():
                setattr(config, name, value)
            if config.top_k is None:
                config.top_k = 0  # generate would use its default of 50
        if self.stop:
            config.stop_strings = list(self.stop)
        self._set_ends(config, of_model)
        self._check_lengths(config)
        if "generation_config" in self.body:
            self._set_choices(config)

    def _check_config(self, config: GenerationConfig, of_model: GenerationConfig) -> None:
        if "generation_config" not in self.body:
            return
        if unknown := set(vars(config)) - set(vars(GenerationConfig())) - set(vars(of_model)):
            raise ValueError(f"generation_config: expected names of a GenerationConfig, not {min(unknown)!r:.200}")
        for name, of_config, is_given in (("logit_bias", "sequence_bias", "sequence_bias" in self.settings),
                                          ("stop", "stop_strings", bool(self.stop))):
            if is_given and getattr(config, of_config) not in (None, getattr(of_model, of_config, None)):
                raise ValueError(f"{name}: expected no {of_config} in generation_config beside it")

    def _check_lengths(self, config: GenerationConfig) -> None:
        least, most = self.settings.get("min_new_tokens"), config.max_new_tokens
        if least is not None and isinstance(most, int) and least > most:
            raise ValueError(f"min_tokens={least}: expected at most {most}, the length of the answer")

    def _set_choices(self, config: GenerationConfig) -> None:
        """Move `num_return_sequences` to `n`; leave an invalid number for `generate` to reject."""
        count, beams = config.num_return_sequences, config.num_beams
        if type(count) is not int or count < 2 or not (config.do_sample or (isinstance(beams, int) and beams > 1)):
            return
        most = 1 if self.has_one_choice or beams not in (None, 1) else MOST_CHOICES
        if count > most:
            raise ValueError(f"num_return_sequences={count}: expected at most {most} here")
        self.n, config.num_return_sequences = self.n or count, None

    def _set_ends(self, config: GenerationConfig, of_model: GenerationConfig) -> None:
        if not self.ignores_eos and not self.stop_token_ids:
            return
        present = config.eos_token_id if config.eos_token_id is not None else of_model.eos_token_id
        eos = [] if self.ignores_eos or present is None else present if isinstance(present, list) else [present]
        config.eos_token_id = [*eos, *self.stop_token_ids] or -1
        if config.eos_token_id == -1:
            config.min_new_tokens = None  # without EOS the processor of the minimum length has no effect


_EACH_ITS_OWN = ("max_new_tokens", "eos_token_id", "transformers_version")
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
