"""What a decoder is fed in place of what its model hands it, in packed steps and in batches of one token a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_paged.models.base import FedTokens
from hf_paged.models.images.decoder_inputs import MASK, feeding
from hf_paged.models.images.fed_prompt import DEEPSTACK, EMBEDS, PER_LAYER

TOKENS = torch.tensor([1, 3])


class Decoder(nn.Module):
    def forward(self, **inputs: object) -> dict[str, object]:
        return inputs


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, **inputs: object) -> object:
        return self.decoder(**inputs)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_vectors_and_positions_have_their_tokens_places(shape):
    rows = {EMBEDS: torch.full((2, 3), 9.0), PER_LAYER: torch.full((2, 2, 3), 8.0), DEEPSTACK: torch.ones(2, 2, 3)}
    fed = FedTokens({name: (TOKENS, given) for name, given in rows.items()}, torch.arange(12).view(3, 4))
    given = {EMBEDS: torch.zeros(*shape, 3), PER_LAYER: torch.zeros(*shape, 2, 3), "position_ids": torch.zeros(shape)}
    found = feeding(Body(), "decoder", fed)(**given)
    assert found[EMBEDS].shape == (*shape, 3) and found[PER_LAYER].shape == (*shape, 2, 3)
    assert found[EMBEDS].flatten(0, 1)[:, 0].tolist() == [0, 9, 0, 9]
    assert found[PER_LAYER].flatten(0, 1)[:, 1, 2].tolist() == [0, 8, 0, 8]
    assert found["position_ids"].shape == (3, *shape) and found["position_ids"].flatten().tolist() == [*range(12)]
    assert found[MASK].shape == shape and found[MASK].flatten().tolist() == [False, True, False, True]
    assert [tuple(adds.shape) for adds in found[DEEPSTACK]] == [(2, 3)] * 2
    assert not given[EMBEDS].any(), "what the model handed over is not written to"


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_positions_of_one_axis_have_no_dimension_for_it(shape):
    found = feeding(Body(), "decoder", FedTokens({}, torch.arange(4)[None]))(**{EMBEDS: torch.zeros(*shape, 3)})
    assert found["position_ids"].shape == shape and found["position_ids"].flatten().tolist() == [0, 1, 2, 3]
