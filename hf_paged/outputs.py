"""Results that callers get: completions, outputs of steps, explanations and counters."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_paged.pictures import stats_html

PATHS = ("native", "lockstep", "stock")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 48


class VersionRun(NamedTuple):
    """Run of ``num_tokens`` consecutive tokens made by one ``version`` of the weights; None if it is unknown."""

    version: int | None
    num_tokens: int


def last_of(runs: Iterable[VersionRun], count: int) -> tuple[VersionRun, ...]:
    """Return the runs of the last ``count`` tokens."""
    return tuple(reversed(first_of(reversed(tuple(runs)), count)))


def first_of(runs: Iterable[VersionRun], count: int) -> list[VersionRun]:
    """Return the runs of the first ``count`` tokens, or all runs if they have fewer tokens."""
    left: list[VersionRun] = []
    for version, length in runs:
        taken = min(length, count)
        count -= taken
        if taken:
            left.append(VersionRun(version, taken))
    return left


class Timings(NamedTuple):
    """Times at which a request passed its stages: seconds of `time.monotonic` in the process that made the request.

    The clock never goes back, counts from an arbitrary point, and is one for all requests of a process: differences
    are durations. A stage that was not reached (an abort while the request waited) is None. A request that an
    interrupt made start over keeps its first times.

    Attributes:
        queued: when the request was added to the engine.
        started: when the first step that computes tokens of the request was launched.
        first_token: when its first new token was on the host; output that was given with the prompt does not count.
        ended: when its completion was made.
    """

    queued: float
    started: float | None
    first_token: float | None
    ended: float


def _versions(runs: Iterable[VersionRun]) -> list[int | None]:
    return [version for version, count in runs for _ in range(count)]


@dataclass(frozen=True)
class Completion:
    """Result of one finished request.

    Attributes:
        token_ids: generated tokens, the stopping EOS included, as in `model.generate`.
        text: `token_ids` decoded, without special tokens unless ``skip_special_tokens=False``, and without the stop
            string or stop token if ``include_stop_str_in_output=False``; None if the engine has no tokenizer.
        finish_reason: "eos", "stop", "length", "timeout", "abort" or "error".
        prompt_token_ids: the prompt as it was run.
        logprobs: for every generated token, its log-probability under the distribution that it was drawn from
            (temperature, filters and barred EOS included; greedy: softmax of the logits, EOS barred); with
            ``logprobs="raw"`` under the model's unprocessed logits. None unless requested.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        error: the error if ``finish_reason == "error"``, else None; for a prompt that could not run (see
            ``on_error`` of `PagedGenerator.generate`) the exception's type and message.
        prompt_logprobs: None for the first prompt token, then log p(token | tokens before it) from the raw logits.
            None unless requested, or if the request ended before all of its prompt was computed.
        version_runs: runs of `token_ids` made by one version of the weights: (version, number of tokens) of each.
        seed: seed of the request's random numbers: a request that continues this completion draws on with this seed.
        logprobs_kind: "processed" or "raw", the kind of `logprobs` and `top_logprobs`; None if there are neither.
        timings: when the request was queued, started, had its first token and ended; None if its prompt could not run.
        stop_reason: the stop string, or the id among ``stop_token_ids``, that ended the request; None if neither did,
            or if the output's text shows none of several stop strings.
        top_logprobs: for every generated token, {token id: log-probability} of the likeliest tokens at its position,
            likeliest first, and of the token itself, last if it is not among them. Tokens that could not be drawn are
            left out, so there may be fewer. None for a token without known ones. None unless requested.
        prompt_top_logprobs: as `prompt_logprobs`, with such a dict for every prompt token but the first.
        routed_experts: with ``PagedConfig(routed_experts=True)`` the experts of each token of prompt and output, an
            int16 tensor [tokens, layers with a router, k] on the CPU; -1 for the last token, which the model was not
            given, and where they are not known.
        has_images: whether the prompt has images; such a completion is not continued.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    prompt_token_ids: list[int]
    logprobs: list[float | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[float | None] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    seed: int | None = None
    logprobs_kind: str | None = None
    timings: Timings | None = None
    stop_reason: str | int | None = None
    top_logprobs: list[dict[int, float] | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    routed_experts: Any = field(default=None, compare=False)
    has_images: bool = False

    def __repr__(self) -> str:
        """Return one line of bounded length, also for an output of many tokens: lists of completions are printed."""
        shown = f"token_ids={_SHORT.repr(self.token_ids)}" if self.text is None else f"text={_SHORT.repr(self.text)}"
        error = "" if self.error is None else f", error={_SHORT.repr(self.error)}"
        return (f"Completion({shown}, finish_reason={_SHORT.repr(self.finish_reason)}{error}, "
                f"{len(self.token_ids)} tokens after a prompt of {len(self.prompt_token_ids)})")

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of `logprobs`: log p of the whole output; None without `logprobs`, or if one of them is unknown."""
        if self.logprobs is None or None in self.logprobs:
            return None
        return math.fsum(known for known in self.logprobs if known is not None)

    @property
    def weight_versions(self) -> list[int | None]:
        """The `EngineStats.weights_version` of the weights that made each generated token.

        None for tokens that were given as ``output_token_ids``, and after an error that left the version unknown.
        """
        return _versions(self.version_runs)


@dataclass(frozen=True)
class StepOutput:
    """Output that one engine step made for one request.

    Attributes:
        request_id: as `Engine.add_request` returned it; empty for a prompt that could not run.
        new_token_ids: tokens made since the last output.
        new_text: text of the new tokens; None if the engine has no tokenizer.
        finish_reason, completion: only with the last output of a request.
        new_logprobs: one per new token, as in `Completion`; None unless requested.
        version_runs: as in `Completion`, of `new_token_ids`.
        new_top_logprobs: one per new token, as in `Completion`; None unless requested.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str | None = None
    finish_reason: str | None = None
    completion: Completion | None = None
    new_logprobs: list[float | None] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    new_top_logprobs: list[dict[int, float] | None] | None = None

    def __repr__(self) -> str:
        """Return one line of bounded length."""
        end = "" if self.completion is None else f", completion={self.completion!r}"
        return (f"StepOutput({_SHORT.repr(self.request_id)}, new_token_ids={_SHORT.repr(self.new_token_ids)}, "
                f"new_text={_SHORT.repr(self.new_text)}{end})")

    @property
    def new_weight_versions(self) -> list[int | None]:
        """The version of the weights that made each new token."""
        return _versions(self.version_runs)


@dataclass(frozen=True)
class Explanation:
    """Path that a call of `model.generate` would take, with reasons and remedies.

    Attributes:
        path: "native" (the engine runs it), "lockstep" (stock's decoding loop picks the tokens, the engine computes its
            forwards) or "stock" (with ``strict=True`` the call raises `FallbackError` instead).
        reasons: why the call is not native, reasons against lockstep first; empty for a native call. Once these
            reasons are remedied, further ones may show.
        remedies: for each reason, what to change.
    """

    path: str
    reasons: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = zip(self.reasons, self.remedies, strict=True)
        return "\n".join([self.path, *(f"  {reason}\n    {remedy}" for reason, remedy in pairs)])


@dataclass(frozen=True)
class CallStats:
    """Counts of the calls that took one path, or took one path for one reason.

    Attributes:
        num_calls: calls that reached decoding, also if they raised then.
        num_tokens: new tokens of all rows that the calls returned, without padding; of beams, and of ``best_of``, only
            the returned rows. A call that raised returned no tokens; a stream the tokens that it had handed out.
        by_reason: the same counts for each reason, in which … stands for values that differ from call to call; empty
            for native calls.
    """

    num_calls: int
    num_tokens: int
    by_reason: Mapping[str, CallStats]


@dataclass(frozen=True)
class WarmUpReport:
    """What `Engine.warm_up` did.

    Attributes:
        num_kernels_compiled, num_kernels_loaded, num_graphs_captured: as in `EngineStats`.
        seconds: how long it took.
    """

    num_kernels_compiled: int
    num_kernels_loaded: int
    num_graphs_captured: int
    seconds: float


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made (num_generated_tokens, ...) and its state now (num_running, ...).

    Attributes:
        num_running, num_waiting: unfinished requests with a row in every step, and those that wait for one.
        num_blocks, num_free_blocks: blocks of the KV pool, and blocks that no request uses.
        num_preemptions: how often a running request gave its blocks back.
        num_generated_tokens, num_prefill_tokens: tokens made, and prompt tokens computed.
        num_steps: steps launched.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and tokens found there.
        kv_cache_bytes: memory of the KV pool, 0 while it is released. torch's counters lack a pool in reserved
            addresses.
        num_pool_growths: how often the pool grew.
        num_graphs_captured, num_graphs_dropped, graphs_dropped_by: CUDA graphs of the present pool, released or not;
            the last counts those dropped by what moved ("token history", "weights", ...).
        weights_version: grows whenever weights, active adapters or constants of the model were found changed
            (docs/reinforcement_learning.md).
        kv_bytes_read: bytes of keys and values that attention read, over all layers, on this rank; a chunk of a prompt
            counts once, of a sliding window its positions.
        kv_bytes_saved: bytes that attention would have read besides, without shared prefixes.
        num_draft_tokens, num_accepted_draft_tokens: guesses that steps computed, and those accepted.
        shadow_bytes: memory of copies of the weights, in the dtype of autocast, dequantised, or gathered from ranks.
        num_kernels_compiled, num_kernels_loaded: kernels that this process compiled, or found on the disk, for all its
            engines.
        compile_wait_seconds, capture_seconds: seconds that steps waited for kernels, and captured CUDA graphs.
        num_steps_delayed, longest_delay_seconds: steps above 50 ms that did either; most seconds of one for both.
        num_rows_replayed, num_rows_not_replayed: rows of forwards by other code that took the routes of completions,
            and rows for which no completion has any (`Engine.replay_routes`).
        num_images_encoded, num_images_reused: images that the model's tower encoded, and that equal an encoded one
            (docs/design/images.md).
        image_bytes: memory of images kept for that, and of what was made of them.
        calls: calls by path, "native", "lockstep" or "stock": of the enabled model's `generate` and `generate_batch`,
            and of `generate`, `stream`, `agenerate` and `astream` of a `PagedGenerator`. Requests of
            `Engine.add_request`, of a continuous batching manager and of the server belong to no call.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_generated_tokens: int
    num_prefill_tokens: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    kv_cache_bytes: int
    num_pool_growths: int
    num_graphs_captured: int
    num_graphs_dropped: int
    weights_version: int
    calls: Mapping[str, CallStats]
    kv_bytes_read: int = 0
    kv_bytes_saved: int = 0
    shadow_bytes: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    graphs_dropped_by: Mapping[str, int] = field(default_factory=dict)
    num_kernels_compiled: int = 0
    num_kernels_loaded: int = 0
    compile_wait_seconds: float = 0.0
    capture_seconds: float = 0.0
    num_steps_delayed: int = 0
    longest_delay_seconds: float = 0.0
    num_rows_replayed: int = 0
    num_rows_not_replayed: int = 0
    num_images_encoded: int = 0
    num_images_reused: int = 0
    image_bytes: int = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests use."""
        return max(self.num_blocks - 1 - self.num_free_blocks, 0)  # block 0, the null block, is never used

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return stats_html(self)
