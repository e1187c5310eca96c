"""The index finds the longest text that stood before, and what followed it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.engine.features import token_index
from hf_paged.engine.features.token_index import NGRAM, Match, TokenIndex

TEXT = st.lists(st.integers(0, 2), max_size=12)  # so few tokens that everything repeats


def common(a, b):
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def brute(texts, text):
    """(common tokens, place) of all places where at least NGRAM of the last tokens stood before something else."""
    own = texts[text]
    return {(count, (other, end)) for other, found in enumerate(texts) for end in range(len(found))
            if (other, end) != (text, len(own)) and (count := common(found[:end], own)) >= NGRAM}


@settings(deadline=None, derandomize=True, max_examples=300)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), cut=st.integers(0, 12), at=st.integers(0, 3))
def test_the_longest_match_is_found_in_texts_that_came_whole_or_grew(texts, cut, at):
    index, at = TokenIndex(), at % len(texts)
    for text in texts:
        index.add(text[:cut])
    for number, text in enumerate(texts):
        index.extend(number, text[cut:])
    assert index.texts == texts
    assert index.num_tokens == sum(map(len, texts))
    found, expected = index.look_up(at), brute(texts, at)
    if not expected:
        assert found is None
    else:
        assert found is not None
        assert found.common == max(expected)[0]
        assert (found.common, (found.text, found.position)) in expected


def test_of_equal_matches_the_latest_is_taken():
    index = TokenIndex()
    index.add([1, 2, 3, 4])
    index.add([1, 2, 3, 5])
    own = index.add([1, 2, 3])
    assert index.look_up(own) == Match(1, 3, 3)


def test_a_longer_match_is_taken_before_a_later_one():
    index = TokenIndex()
    index.add([9, 1, 2, 3, 4])
    index.add([8, 1, 2, 3, 5])
    own = index.add([9, 1, 2, 3])
    assert index.look_up(own) == Match(0, 4, 4)


def test_a_text_that_repeats_its_end_goes_on_repeating_it():
    index = TokenIndex()
    own = index.add([7, 1, 2, 3, 1, 2, 3, 1, 2])
    match = index.look_up(own)
    assert match == Match(0, 6, 5)
    assert index.continuation(own, match, 7) == [3, 1, 2, 3, 1, 2, 3]
    other = index.add([5])
    assert index.continuation(other, match, 7) == [3, 1, 2]  # somebody else's end is not known


def test_tokens_with_the_same_key_are_told_apart():
    """Keys hold 21 bits of a token."""
    index, big = TokenIndex(), 1 << token_index._TOKEN_BITS
    index.add([0, 1, 5, 7])
    own = index.add([0, 0, big + 5])
    assert index._before[own][-1] != token_index._NOWHERE
    assert index.look_up(own) is None


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_texts_have_no_match(count):
    index = TokenIndex()
    index.add([1, 1, 1, 1])
    assert index.look_up(index.add([1] * count)) is None
