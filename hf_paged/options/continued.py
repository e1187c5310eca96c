"""Prompts with an earlier output, which a request continues as if it had not been ended half-way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_paged.options.arguments import token_ids
from hf_paged.outputs import Completion, VersionRun, last_of

OUTPUT = "output_token_ids"


@dataclass(frozen=True)
class PreviousOutput:
    """An earlier output, which counts as generated.

    Attributes:
        token_ids: the tokens; empty if the request was ended before its first token.
        logprobs: log-probabilities of the tokens, or None.
        logprobs_kind: the kind of `logprobs`, as in `Completion`.
        top_logprobs: as in `Completion`; ids may be str, as in JSON.
        version_runs: as in `Completion`.
        seed: the request's seed; None for the call's.
    """

    token_ids: list[int]
    logprobs: list[float | None] | None = None
    logprobs_kind: str | None = None
    version_runs: tuple[VersionRun, ...] = ()
    seed: int | None = None
    top_logprobs: list[Any] | None = None

    def checked(self, vocab_size: int, max_new_tokens: int, logprobs_kind: str | None) -> PreviousOutput:
        """Return the output with checked token ids, if a request with these settings can continue it.

        Raises:
            ValueError, TypeError: the output cannot be continued; the message says why.
        """
        ids = token_ids(self.token_ids, vocab_size, OUTPUT) if len(self.token_ids) else []
        if len(ids) > max_new_tokens:
            raise ValueError(f"{OUTPUT} of {len(ids)} tokens: expected at most {max_new_tokens}, the max_new_tokens, "
                             "which count from the prompt")
        if None not in (logprobs_kind, self.logprobs_kind) and logprobs_kind != self.logprobs_kind:
            raise ValueError(f"logprobs={logprobs_kind!r}: expected {self.logprobs_kind!r}, as the completion has them")
        return replace(self, token_ids=ids)

    def known_logprobs(self) -> list[float | None]:
        """Return one entry per token; all are None if `logprobs` has another length."""
        count = len(self.token_ids)
        return list(self.logprobs) if self.logprobs is not None and len(self.logprobs) == count else [None] * count

    def known_top_logprobs(self) -> list[dict[int, float] | None]:
        """Return one dict per token; all are None if `top_logprobs` has another length."""
        tops, count = self.top_logprobs, len(self.token_ids)
        if tops is None or len(tops) != count:
            return [None] * count
        return [None if top is None else {int(token): known for token, known in top.items()} for top in tops]

    def known_versions(self) -> list[VersionRun]:
        """Return version runs of all tokens, with the version None if it is unknown."""
        count = len(self.token_ids)
        if sum(run.num_tokens for run in self.version_runs) == count:
            return list(self.version_runs)
        return list(last_of([VersionRun(None, count)], count))


def split_output(prompt: Any) -> tuple[Any, PreviousOutput | None]:
    """Return a prompt in one of the forms of `prompt_ids`, and its earlier output or None.

    Raises:
        TypeError: the output or the versions are no sequence.
    """
    if isinstance(prompt, Completion):
        return prompt.prompt_token_ids, PreviousOutput(prompt.token_ids, prompt.logprobs, prompt.logprobs_kind,
                                             tuple(VersionRun(*run) for run in prompt.version_runs), prompt.seed,
                                             prompt.top_logprobs)
    if isinstance(prompt, dict) and prompt.get(OUTPUT) is not None:
        output = prompt[OUTPUT]
        if isinstance(output, (str, bytes)) or not hasattr(output, "__len__"):
            raise TypeError(f"{OUTPUT}={output!r:.80}: expected token ids, got {type(output).__name__}")
        return {name: value for name, value in prompt.items() if name != OUTPUT}, PreviousOutput(output)
    return prompt, None
