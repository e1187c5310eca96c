"""Masks of rows under grammars: those that the matchers say, in one buffer, in a thread or not."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from support import byte_tokenizer, in_child

from hf_paged.config import PagedConfig
from hf_paged.engine.structured.grammars import Grammars
from hf_paged.engine.structured.mask_maker import MaskMaker
from hf_paged.options.structured import Structured

CPU = torch.device("cpu")


@pytest.fixture
def grammars():
    pytest.importorskip("xgrammar", reason="of the extra `structured`")
    return Grammars(300, PagedConfig())


def test_masks_of_some_rows_and_of_growing_batches(grammars):
    tokenizer, maker = byte_tokenizer(), MaskMaker(300, CPU)
    digits = grammars.compile(Structured("regex", "[0-9]+"), tokenizer)
    letters = grammars.compile(Structured("regex", "[a-c]+"), tokenizer)
    for count in (1, 3, 40, 2):
        matchers = [None, *([digits.matcher((299,)), None, letters.matcher((299,))] * count)]
        masks = maker.make(matchers)
        assert [line >= 0 for line in masks.lines.tolist()] == [matcher is not None for matcher in matchers]
        for matcher, line in zip(matchers, masks.lines.tolist(), strict=True):
            if matcher is not None:
                words = torch.empty_like(masks.words[line])
                matcher.fill(words)
                assert torch.equal(masks.words[line], words) and words.any()


def test_masks_are_the_same_beside_other_work(grammars, monkeypatch):
    """In a thread where there are enough; also with matchers of others among them, and after one that failed."""
    tokenizer, maker = byte_tokenizer(), MaskMaker(300, CPU)
    threads, fill = set(), MaskMaker._fill_batch
    monkeypatch.setattr(MaskMaker, "_fill_batch", lambda *args: (threads.add(threading.current_thread().name),
                                                                 fill(*args))[1])
    forms = [grammars.compile(Structured("regex", form), tokenizer) for form in ("[0-9]+", "[a-c]+", "x|yz")]

    class Other:
        is_over = False

        def fill(self, words):
            words.fill_(6)

    for count in (1, 3, 4, 40):
        matchers = [None, *(forms[i % 3].matcher((299,)) for i in range(count)), None]
        if count > 3:
            matchers.insert(2, Other())
        expected = maker.make(matchers)
        words, lines = expected.words.clone(), expected.lines
        threads.clear()
        end = maker.begin(matchers)
        made = end()
        assert torch.equal(made.words, words) and made.lines.tolist() == lines.tolist()
        assert {name.startswith("hf_paged-masks") for name in threads} == ({True} if count >= 4 else set())
    over = forms[2].matcher((299,))
    assert all(over.accept(token) for token in [*tokenizer("x")["input_ids"], 299])
    matchers[5] = over  # xgrammar refuses to say what may follow a stop token
    with pytest.raises(RuntimeError):
        maker.begin(matchers)()
    matchers[5] = None
    assert len(maker.begin(matchers)().words) == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_waits_for_masks_in_the_making_and_the_child_makes_its_own(grammars):
    tokenizer, maker = byte_tokenizer(), MaskMaker(300, CPU)
    matchers = [grammars.compile(Structured("regex", "[0-9]+"), tokenizer).matcher(()) for _ in range(8)]
    expected = maker.make(matchers).words.clone()
    pending = maker.begin(matchers)

    def make():
        assert torch.equal(pending().words, expected) and torch.equal(maker.begin(matchers)().words, expected)
        grammars.compile(Structured("regex", "[a-f]{3}"), tokenizer)

    assert in_child(make) == 0 and torch.equal(pending().words, expected)
