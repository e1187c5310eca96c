"""Shape of a step, which is the key of a captured one."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from hf_paged.kernels.attention.types import GroupedConfig

Kind = Literal["decode", "logits", "undrawn", "prompts", "prompt_logits", "mixed", "masked"]


class GroupedTiles(NamedTuple):
    """Constants of a captured attention plan over shared prefixes, see `GroupedWork`."""

    num_parts: int
    config: GroupedConfig


class StepShape(NamedTuple):
    """Shape of a step. Two steps of one shape replay one graph.

    Attributes:
        kind: the method of `PaddedSteps` that computes the step.
        rows: padded number of decode rows.
        tokens, prompts: padded numbers of tokens of prompts, and of prompts.
        stages: stages of logits editing that the rows need, see `RequestState.stages`.
        scored: names of the log-probabilities that the step brings, see `RequestState.sample`.
        named: whether a row names an adapter.
        with_logits: whether the result keeps the logits beside the tokens.
        long, queued: results of `AttentionInputs.is_long` and `wants_queue` for the prompts.
        tiles: tiles of prefixes that the decode rows share, or in a step with prompts the prompts.
        decode_tiles: tiles of prefixes that decode rows beside prompts share.
        one_launch: whether one launch may compute all layers; as a key: whether it does.
        after: the graph whose logits a ``masked`` step reads.
    """

    kind: Kind
    rows: int = 0
    tokens: int = 0
    prompts: int = 0
    stages: frozenset[str] = frozenset()
    scored: tuple[str, ...] = ()
    named: bool = False
    with_logits: bool = False
    long: bool = False
    queued: bool = False
    tiles: GroupedTiles | None = None
    decode_tiles: GroupedTiles | None = None
    one_launch: bool = False
    after: object = None

    @property
    def num_first_runs(self) -> float:
        """Return how often the step runs before it is captured: most sizes of prompts come once or twice."""
        if self.kind == "masked" and self.after is None:
            return math.inf
        return 2 if self.tokens else 1

    @property
    def name(self) -> str:
        """Kind and sizes, as profiles show a replay."""
        return f"{self.kind} {'x'.join(str(size) for size in (self.rows, self.tokens, self.prompts) if size)}"
