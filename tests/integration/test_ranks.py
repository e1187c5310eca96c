"""What a rank raises before it meets the others is told to them once; whole models in processes: tests/parallel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_paged.integration import paths, ranks


class Replica:
    """Counts its meetings as the ranks' rendezvous does."""

    def __init__(self, **state):
        self.is_readable, self.is_pinned, self.refused, self.num_meetings = True, False, [], 3
        vars(self).update(state)

    def refuse(self, error):
        self.num_meetings += 1
        self.refused.append(error)


@pytest.fixture(autouse=True)
def _meetings_of_the_model_itself(monkeypatch):
    monkeypatch.setattr(ranks, "num_meetings", lambda model: model.num_meetings)


def engine_of(replica):
    return SimpleNamespace(replica=replica, model=replica, finds_shards=lambda: True)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_of_a_call_that_has_not_met_is_told_once(error):
    """Though entries lie inside of each other."""
    replica = Replica()
    with pytest.raises(type(error)), ranks.refusing(engine_of(replica)), ranks.refusing(engine_of(replica)):
        raise error
    assert replica.refused == [error]


def test_an_error_behind_a_meeting_is_not_told():
    replica = Replica()

    def meet_and_raise():
        with ranks.refusing(engine_of(replica)):
            replica.num_meetings += 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        meet_and_raise()
    assert not replica.refused


@pytest.mark.parametrize("state", [{"is_pinned": True}, {"is_readable": False}], ids=str)
def test_nothing_is_told_where_ranks_do_not_meet(state):
    replica = Replica(**state)
    with pytest.raises(ValueError, match="no"), ranks.refusing(engine_of(replica)):
        raise ValueError("no")
    assert not replica.refused


def test_an_error_of_a_question_is_not_told():
    replica = Replica()
    engine = engine_of(replica)
    asking = paths.within(paths.ASKED, paths.Question(engine))
    with pytest.raises(ValueError, match="no"), asking, ranks.refusing(engine):
        raise ValueError("no")
    assert not replica.refused


def test_an_error_in_telling_does_not_hide_the_calls_own():
    replica = Replica(refuse=lambda error: 1 / 0)
    with pytest.raises(ValueError, match="no"), ranks.refusing(engine_of(replica)):
        raise ValueError("no")
