"""What ends requests besides EOS and their length, rows of one criterion looked at together."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_paged.engine.features import CommittedStep
from hf_paged.engine.features.stop_rules import StopRule, StopRules, TextStopRule
from hf_paged.options.request_spec import RequestSpec

BAD, STOP, PLAIN = 7, 8, 9


class Criterion:
    """Stops at one token, and raises at another, as stop strings do at an id that their tokenizer does not have."""

    def __call__(self, tails: torch.Tensor, scores: None) -> torch.Tensor:
        if (tails == BAD).any():
            raise KeyError(BAD)
        return tails[:, -1] == STOP


def rule_of(criterion):
    criterion.maximum_token_len = 4
    return StopRule(criterion, None, [])


def ended(rows):
    """Which of (name, rule, new token) end: {name: reason, or what the rule raised}."""
    feature, found = StopRules(), {}

    def attempt(request, action, *args):
        try:
            return action(*args)
        except Exception as error:
            found[request.request_id] = error

    feature.attempt = attempt
    sequences = [SimpleNamespace(request_id=name) for name, _, _ in rows]
    feature.requests = {name: SimpleNamespace(request_id=name, spec=RequestSpec(stop=rule), sequence=sequence)
                        for (name, rule, _), sequence in zip(rows, sequences, strict=True)}
    step = CommittedStep(SimpleNamespace(sequences=sequences), None, np.array([token for *_, token in rows]), 0)
    for row in feature.ends(step, np.ones(len(rows), bool)):
        name = sequences[row].request_id
        found[name] = feature.take(feature.requests[name], step, row)
    return found


@pytest.mark.parametrize("tokens", [(BAD, STOP, PLAIN), (STOP, PLAIN, BAD), (PLAIN, BAD, STOP)])
def test_a_criterion_that_raises_at_one_row_ends_that_row_alone(tokens):
    """The rows beside it are looked at all the same: one ends with its stop string, one goes on."""
    criterion, names = Criterion(), {BAD: "bad", STOP: "stops", PLAIN: "goes on"}
    result = ended([(names[token], rule_of(criterion), token) for token in tokens])
    assert set(result) == {"bad", "stops"}
    assert result["stops"] == "stop" and isinstance(result["bad"], KeyError)


def met_at(rule, tokens):
    """The number of tokens after which the rule ends a request, or None."""
    return next((count for count, token in enumerate(tokens, 1) if ended([("one", rule, token)])), None)


@pytest.mark.parametrize("stop", ["3 to", "to 7", "from", "7", "<|im_end|>", "é", "🦊", "7\n🦊", "never"])
def test_a_text_ends_a_request_where_its_last_token_comes(trained_tokenizer, stop):
    """Also one of special tokens, and characters that several tokens make up; and again after a restart."""
    tokens = trained_tokenizer("count from 3 to 7\n🦊é<|im_end|>", add_special_tokens=False)["input_ids"]
    ends = [n for n in range(1, len(tokens) + 1) if stop in trained_tokenizer.decode(tokens[:n])]
    rule = TextStopRule(("never this", stop), trained_tokenizer)
    assert met_at(rule, tokens) == (ends[0] if ends else None)
    rule.restart()
    assert met_at(rule, tokens) == (ends[0] if ends else None)
    assert met_at(pickle.loads(pickle.dumps(TextStopRule((stop,), trained_tokenizer))), tokens) == (
        ends[0] if ends else None)


def test_a_text_before_a_restart_does_not_count(trained_tokenizer):
    first, second = (trained_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("3 t", "o 7"))
    rule = TextStopRule(("3 to 7",), trained_tokenizer)
    assert met_at(rule, first) is None
    rule.restart()
    assert met_at(rule, second) is None


def test_the_time_of_a_request_with_a_text_ends_too(trained_tokenizer):
    late = TextStopRule(("never",), trained_tokenizer, deadline=0.0)
    assert ended([("late", late, 5)]) == {"late": "length"}
    assert ended([("not late", late.without_deadline(), 5)]) == {}
