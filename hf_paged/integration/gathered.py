"""`hf_paged.gathered`: a block in which ranks of a sharded model generate independently of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hf_paged.errors import FallbackError
from hf_paged.integration.enable import get_engine
from hf_paged.integration.ranks import OTHERS_IN_STOCK, come, refusing


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Inside of this block a rank generates as often as it likes, whatever the others do, and natively only.

    For an enabled model that is sharded by FSDP2. All ranks enter the block, which gathers the weights where they
    changed; from then on none waits for another. Leaving waits for nobody. Of any other model this does nothing.

    Args:
        model: enabled, as for `get_engine`.

    Yields:
        `model`.

    Raises:
        ValueError: the model is not enabled.
        RankAloneError: not all ranks enter within `PagedConfig.gather_timeout`.
        FallbackError: another rank's call goes to stock generate meanwhile, or, of calls inside of the block, this
            one would.
        UnsupportedModelError: the model cannot run natively as it is now.
    """
    engine = get_engine(model)
    if engine.finds_shards():
        with refusing(engine):
            engine.check_runnable()
    replica = engine.replica
    if replica is None:
        yield model
        return
    if not come(engine, replica):
        raise FallbackError(f"gathered: {OTHERS_IN_STOCK.with_remedy}")
    with replica.pinned(in_all_threads=True):
        yield model
