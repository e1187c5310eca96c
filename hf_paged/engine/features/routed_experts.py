"""The experts that the tokens of a request took, read out of the KV pool when the request ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.engine.features import StepFeature
from hf_paged.engine.session import LastOutput, Request
from hf_paged.models.base import RoutesShape
from hf_paged.models.routing.record import UNKNOWN


class RoutedExperts(StepFeature):
    """Requests whose completions name the experts of each token: all of an engine that records them.

    They are read before another step is launched, so that no other request has written to the blocks yet. A request
    that ends while it waits (preempted, with its last token in flight) has blocks no longer, and no known routes.

    Args:
        shape: of a token's routes; None: they are not recorded.
        read: returns the routes of so many tokens in these blocks.

    Attributes:
        keep: called for a request that ended, with its token ids, prompt and output, their routes, if all but the last
            one's are known, and the name of the adapter that it gave.
    """

    def __init__(self, shape: RoutesShape | None, read: Callable[[list[int], int], torch.Tensor]) -> None:
        super().__init__()
        self._shape, self._read = shape, read
        self.keep: Callable[[list[int], torch.Tensor, str | None], None] | None = None

    def uses(self, request: Request) -> bool:
        return self._shape is not None

    def complete(self, request: Request, last: LastOutput) -> None:
        assert self._shape is not None
        sequence = request.sequence
        tokens = sequence.prompt_token_ids + last.token_ids
        routes = torch.full((len(tokens), *self._shape[:2]), UNKNOWN, dtype=torch.int16, device="cpu")
        if sequence.last_blocks:
            known = min(sequence.num_computed_tokens, len(tokens) - 1)
            routes[:known] = self._read(sequence.last_blocks, known)
            if self.keep is not None and known == len(tokens) - 1:
                self.keep(tokens, routes, sequence.adapter)
        last.completion["routed_experts"] = routes
