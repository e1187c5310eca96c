"""Calls of a model that FSDP2 shards over ranks: all ranks choose the path of a call together.

In a native call a rank computes alone, with weights gathered at the call's begin. In stock every forward is a
collective. So the ranks exchange their decisions when a call begins (`parallel.rendezvous`), and run all natively or
all in stock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackError, Reason
from hf_paged.integration import paths
from hf_paged.parallel.replica import Replica, num_meetings

T = TypeVar("T")
OTHERS_IN_STOCK = Reason("this call runs in stock on another rank of the sharded model",
                         remedy="The warning on that rank has the reason. Stock's forwards need all ranks.")


def run_natively(engine: Engine, run: Callable[[], T | Reason], *, in_all_threads: bool = False) -> T | Reason:
    """Call `run()` over gathered weights if all ranks agree to run natively, else return `OTHERS_IN_STOCK`.

    `in_all_threads`: the work of `run` is done in other threads too.

    Raises:
        RankAloneError: If not all ranks call.
        FallbackError: If `run` returns a reason, when the other ranks already run natively.
    """
    replica = engine.replica
    assert replica is not None
    if not come(engine, replica):
        return OTHERS_IN_STOCK
    with replica.pinned(in_all_threads=in_all_threads):
        result = run()
    if isinstance(result, Reason):
        raise FallbackError(f"this call of a sharded model cannot end natively, and the other ranks are past the point "
                            f"where all could go to stock generate: {result.with_remedy}")
    return result


def go_to_stock(engine: Engine, reason: Reason) -> None:
    """Make the other ranks run this call in stock too, before it does.

    Raises:
        RankAloneError: If not all ranks call.
        FallbackError: Inside `gathered`, where ranks do not meet.
    """
    replica = engine.replica
    if replica is None or reason is OTHERS_IN_STOCK or not replica.is_readable:
        return
    if replica.is_pinned:
        raise FallbackError("inside of hf_paged.gathered(model), and of a call that runs natively on all ranks, none "
                            f"goes to stock generate, whose forwards need all ranks: {reason.with_remedy}")
    replica.come_in_stock(engine.config.gather_timeout)


@contextmanager
def refusing(engine: Engine) -> Iterator[None]:
    """Report an exception raised before the ranks have met to the other ranks, which would wait for this one.

    An entry point must process its arguments in this context, up to the meeting of the ranks.
    """
    if paths.asked() is engine:  # `explain` runs on this rank only
        yield
        return
    before = num_meetings(engine.model)
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the call's own error is the one to raise
            if engine.finds_shards() and num_meetings(engine.model) == before:
                replica = engine.replica
                if replica is not None and replica.is_readable and not replica.is_pinned:
                    replica.refuse(error)
        raise


def come(engine: Engine, replica: Replica) -> bool:
    """Call `Replica.come`; inside `gathered`, where ranks do not meet, only check this rank's weights."""
    if not replica.is_pinned:
        return replica.come(engine.config.gather_timeout, engine.writing_weights, strict=engine.config.strict)
    engine.check_gathered()
    return True
