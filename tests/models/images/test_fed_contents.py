"""Numbers of fed rows: by their content alone, compared number by number."""

from __future__ import annotations

import torch

from hf_paged.models.images import fed_contents
from hf_paged.models.images.fed_contents import FedContents


def rows(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"inputs_embeds": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)}


def test_equal_rows_have_one_number_and_are_held_once():
    contents, given = FedContents(), rows(0)
    number, held = contents.find(given)
    assert contents.find(rows(0)) == (number, held)
    assert held["inputs_embeds"].data_ptr() != given["inputs_embeds"].data_ptr()  # of a batch's, which is not kept
    others = [rows(1), rows(0, torch.float64), {"inputs_embeds": rows(0)["inputs_embeds"][:2]},
              rows(0) | {"per_layer_inputs": torch.ones(3, 1)}, {"inputs_embeds": rows(0)["inputs_embeds"].flip(0)}]
    assert len({number, *(contents.find(other)[0] for other in others)}) == 6


def test_a_sum_alone_is_not_believed(monkeypatch):
    monkeypatch.setattr(fed_contents, "_sum", lambda part: 0.0)
    contents = FedContents()
    assert [contents.find(rows(seed))[0] for seed in (0, 1, 0, 1)] == [1, 2, 1, 2]


def test_what_was_not_used_for_long_gets_a_new_number():
    contents = FedContents(most_bytes=2 * 48)
    assert [contents.find(rows(seed))[0] for seed in (0, 1, 0, 2, 0, 1)] == [1, 2, 1, 3, 1, 4]


def test_rows_that_are_larger_than_all_room():
    contents = FedContents(most_bytes=0)
    assert [contents.find(rows(seed))[0] for seed in (0, 0, 1, 0)] == [1, 1, 2, 3]
