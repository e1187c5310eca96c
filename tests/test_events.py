"""Events where nothing runs; over ranks they are tested in `integration/parallel/test_generator_over_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace

from hf_paged.events import End, Events
from hf_paged.integration.parallel.group import ParallelGroup


class Carrier:
    def carry_out(self, event):
        raise AssertionError(f"nobody waits for {event}")


def test_the_end_of_what_has_ended_is_not_told():
    """Ranks of one script all call `step`; with nothing running, those without such an end would not meet rank 0."""
    loop = SimpleNamespace(is_idle=True, heard=False, requests={}, failed_here=[], step=lambda **_: None)
    carrier = Carrier()
    events = Events(ParallelGroup(0, 2), loop, carrier.carry_out)
    events.soon(End(("gone",), "length"))
    assert events.step() == []
    assert events.step() == []
