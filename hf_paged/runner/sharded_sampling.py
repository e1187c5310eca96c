"""Sampling with logits whose columns are spread over ranks, and a flag by which rank 0 announces a command.

No rank has the logits of a whole vocabulary for all rows. Rows without filters cost a maximum over ranks of 8 bytes per
row (`shard_best`). Rows with filters, edits or log-probabilities are distributed: each rank gets whole rows of its
share, samples them as one rank does, and sends the tokens by the same maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import pad

from hf_paged.models import ModelExecutor
from hf_paged.sampling.log_probs import shape_of
from hf_paged.sampling.sample_tokens import GROUP_SIZE
from hf_paged.sampling.shard_best import NO_TOKEN, Columns, best_of_shard, keys_of, settle_tokens
from hf_paged.sampling.table import SamplingTable
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens

_ALIGNED = 16  # the kernel that sums log-probabilities is another for a number that is no multiple


class ShardedSampling:
    """The ranks of one model, this rank's columns, and a flag that is reduced in every step.

    Attributes:
        said: [1] int64 on the device: 1 while rank 0 has a command to send (`engine.ranks.commands`), 0 on other ranks.
        heard: [1] int64 on the device: the maximum of the ranks' `said` in the last step.
    """

    def __init__(self, executor: ModelExecutor, device: torch.device) -> None:
        head = executor.head
        self.group, self._columns = executor.group, Columns(head.first, head.first + head.num_real)
        self._num_logits = executor.num_logits
        self.said, self.heard = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._says = False  # host copy of `said`

    def say(self, something: bool) -> None:
        """Set the flag for steps launched from now on."""
        if something != self._says:
            self.said.fill_(int(something))
            self._says = something

    def can_agree(self, logits: torch.Tensor) -> bool:
        """Return whether every rank's columns begin at a group of the sampler, which fails for small vocabularies."""
        return logits.shape[1] % GROUP_SIZE == 0

    def agree(self, logits: torch.Tensor, table: SamplingTable, slots: torch.Tensor, positions: torch.Tensor,
              history: torch.Tensor, masks: TokenMasks | None = None) -> torch.Tensor:
        """Sample as `sample_tokens` from this rank's columns [R, n], for rows without filters; requires `can_agree`.

        ``masks`` of the R rows are applied to the columns in place.
        """
        if masks is not None:
            mask_tokens(logits, masks, self._columns.first)
        return self._settle(best_of_shard(logits, self._columns, table, slots, positions), slots, positions, history)

    def deal(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, padding_slot: int,
             history: torch.Tensor, draw: Callable[..., torch.Tensor],
             logprobs: Mapping[str, torch.Tensor], masks: TokenMasks | None = None) -> torch.Tensor:
        """Sample by ``draw(logits, slots, positions, logprobs, masks)``, which each rank calls for its share of rows.

        Arguments and result as in `agree`; ``logprobs``, as in `RequestState.sample`, are filled for all rows.
        """
        rows, size = len(slots), self.group.size
        padding = -rows % size
        share = (rows + padding) // size
        mine = slice(self.group.rank * share, (self.group.rank + 1) * share)
        logits = pad(logits, (0, 0, 0, padding)) if padding else logits  # a pad of 0 would copy
        whole = self.group.exchange_rows(logits)[:, : self._num_logits]
        known = {name: torch.empty(shape_of(name, share), device=logits.device, dtype=torch.float32)
                 for name in logprobs}
        tokens = draw(whole, pad(slots, (0, padding), value=padding_slot)[mine], pad(positions, (0, padding))[mine],
                      known, None if masks is None else masks.of(mine, padding))
        keys = torch.full((rows + padding,), NO_TOKEN, dtype=torch.int64, device=logits.device)
        keys[mine] = keys_of(tokens)
        for name, values in known.items():
            length = -(-(rows + padding) // _ALIGNED) * _ALIGNED
            every = torch.zeros(shape_of(name, length), dtype=torch.float32, device=logits.device)
            every[mine] = values
            logprobs[name].copy_(self.group.all_reduce(every)[:rows])
        return self._settle(keys[:rows], slots, positions, history)

    def listen(self) -> None:
        """Reduce the flag alone, for steps that do not sample."""
        self.heard.copy_(self.group.all_reduce_max(self.said.clone()))

    def _settle(self, keys: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
                history: torch.Tensor) -> torch.Tensor:
        keys = self.group.all_reduce_max(torch.cat([keys, self.said]))
        self.heard.copy_(keys[-1:])
        return settle_tokens(keys[:-1], slots, positions, history)
