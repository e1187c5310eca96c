"""`hf_paged.gathered`: a context in which ranks of a sharded model generate independently of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hf_paged.errors import FallbackError
from hf_paged.integration.enable import get_engine
from hf_paged.integration.ranks import OTHERS_IN_STOCK, come, refusing


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Let each rank generate natively and independently of the others within the context.

    For an enabled model that is sharded by FSDP2. All ranks enter the context, which gathers the weights if they
    changed; afterwards no rank waits for another, also at the end. Has no effect on any other model.

    Args:
        model: An enabled model, as for `get_engine`.

    Yields:
        `model`.

    Raises:
        ValueError: If the model is not enabled.
        RankAloneError: If not all ranks enter within `PagedConfig.gather_timeout`.
        FallbackError: If another rank's call goes to stock generate meanwhile, or if a call inside the context would.
        UnsupportedModelError: If the model cannot run natively in its current state.
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
