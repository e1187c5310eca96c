"""The list of steps on padding rows that compile, without a request, the kernels of requests to come.

They are meant for dry runs (`kernels/build/compiling.py`), and change nothing that a request reads if they are run.
Three classes of features: what any request may need; *optional* ones, which clients of an OpenAI API ask for; and all
other edits of logits, whose kernels are compiled for the first request with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, zip_longest

from hf_paged.runner.padded_steps import GUESSING_SIZES, PaddedSteps
from hf_paged.sampling.log_probs import FILTERS, LOGPROBS

# Stages of logits editing that are optional features: biases of tokens, and penalties.
OPTIONAL_EDITS = frozenset({"sequence_bias", "bad_words", "repetition_penalty", "counts"})
_MIDDLING_TOKENS = 512
_FEW_ROWS = 2  # the kernels of sampling are the same for any number of rows


def dry_runs(steps: PaddedSteps, most_rows: int, most_tokens: int = 0, *,
             optional: bool = False) -> Iterator[Callable[[], object]]:
    """Yield functions that run the graphs' steps of up to so many decode rows and prompt tokens, on padding only.

    Alternates decode rows and prompts. Successive numbers of decode rows are far apart, since neighbours mostly run the
    same kernels and a waiting caller should not wait for all of them. Prompts come in ascending order. Steps that share
    a prefix follow the first of their kind, and steps whose rows name adapters the others.

    Args:
        optional: Whether steps with optional features follow.
    """
    decode_sizes = far_apart([int(size) for size in steps.decode_sizes if size <= most_rows])
    prompt_sizes = [int(size) for size in steps.prompt_sizes if 0 < size <= most_tokens]
    for at, (num_rows, num_tokens) in enumerate(zip_longest(decode_sizes, prompt_sizes, fillvalue=0)):
        if num_rows:
            yield partial(steps.run_padding_rows, num_rows)
        if num_tokens:
            yield partial(steps.run_padding_tokens, num_tokens)
        if not at:
            yield from _of_other_kinds(steps, decode_sizes, prompt_sizes)
            if most_tokens:
                yield from _without_graphs(steps)
    if steps.state.adapters.num_names > 1:
        yield from _with_names(steps, decode_sizes, prompt_sizes)
    if optional:
        yield from _optional(steps, decode_sizes, prompt_sizes)


def rows_with(steps: PaddedSteps, stages: frozenset[str], scored: tuple[str, ...], *, masked: bool,
              named: bool) -> None:
    """Run padding rows with options of requests: edits of logits, log-probabilities, token masks, named adapters."""
    steps.run_padding_rows(_FEW_ROWS, stages=stages, scored=scored)
    if masked:
        steps.run_masked_padding(_FEW_ROWS, stages, scored)
    if named:
        for size in steps.decode_sizes:
            steps.run_padding_rows(int(size), named=True)
        for size in steps.prompt_sizes[steps.prompt_sizes > 0][:1]:
            steps.run_padding_tokens(int(size), named=True)


def _of_other_kinds(steps: PaddedSteps, decode_sizes: list[int],
                    prompt_sizes: list[int]) -> Iterator[Callable[[], object]]:
    """Yield steps of any request that run other kernels than the steps of their size."""
    shares = max(decode_sizes, default=0) > 1 and not steps.prompt_lengths  # rows with states share no prefix
    if shares:
        yield partial(steps.run_padding_rows, max(decode_sizes), shared=True)
    if prompt_sizes:
        # Of a middling size: the largest one would count in the peak by which the pool is sized.
        size = next((size for size in prompt_sizes if size >= _MIDDLING_TOKENS), prompt_sizes[-1])
        yield partial(steps.run_padding_tokens, size, long=True)
        if shares:
            yield partial(steps.run_padding_tokens, size, shared=True)
    if steps.state.sharded is not None:  # ranks deal rows with filters among each other, and agree on other rows
        yield partial(steps.run_padding_rows, _FEW_ROWS, stages=frozenset({FILTERS}))


def _without_graphs(steps: PaddedSteps) -> Iterator[Callable[[], object]]:
    """Yield prompts of models with states, the longest first: they are not padded to few sizes."""
    for size, long in product(steps.prompt_lengths[::-1], (False, True)):
        yield partial(steps.run_padding_prompt, size, long=long)


def _with_names(steps: PaddedSteps, decode_sizes: list[int],
                prompt_sizes: list[int]) -> Iterator[Callable[[], object]]:
    yield from (partial(steps.run_padding_rows, size, named=True) for size in decode_sizes)
    yield from (partial(steps.run_padding_tokens, size, named=True) for size in prompt_sizes)


def _optional(steps: PaddedSteps, decode_sizes: list[int],
              prompt_sizes: list[int]) -> Iterator[Callable[[], object]]:
    """Yield steps with each optional feature, longest compilations first."""
    # Edits make the logits float32, for which the sampler is another kernel; penalties behind biases read float32, too.
    edits = frozenset({"repetition_penalty"}), OPTIONAL_EDITS, frozenset[str]()
    for scored, stages in product(((), LOGPROBS), edits):
        yield partial(steps.run_padding_rows, _FEW_ROWS, stages=stages, scored=scored)
    for stages in edits[1:]:
        yield partial(steps.run_masked_padding, _FEW_ROWS, stages, LOGPROBS)
    if steps.state.adapters.num_names == 1:
        yield from _with_names(steps, decode_sizes, prompt_sizes)
    most = max(decode_sizes, default=0)
    yield from (partial(steps.run_padding_rows, int(size)) for size in GUESSING_SIZES if size > most)


def far_apart(sizes: Sequence[int]) -> list[int]:
    """Reorder sizes: first, last, middle, then the middles of the halves, and so on."""
    found, spans = list(dict.fromkeys((*sizes[:1], *sizes[-1:]))), [(0, len(sizes) - 1)]
    for low, high in spans:
        if (middle := (low + high) // 2) > low:
            found.append(sizes[middle])
            spans += (low, middle), (middle, high)
    return found
