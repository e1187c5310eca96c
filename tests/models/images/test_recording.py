"""What is recorded of a call: what the model's own code hands its decoder, and what of it is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_paged.errors import Reason
from hf_paged.models.base import AttentionMask
from hf_paged.models.images.decoder_inputs import MASK
from hf_paged.models.images.fed_contents import FedContents
from hf_paged.models.images.fed_prompt import DEEPSTACK, EMBEDS, FedPrompt
from hf_paged.models.images.recording import record

IMAGE = 9
IDS = torch.tensor([[0, 0, 1, IMAGE, IMAGE, 2], [3, IMAGE, 4, IMAGE, 5, 6]])
LENGTHS = [4, 6]
COUNTED = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])


class Decoder(nn.Module):
    def forward(self, **inputs: Any) -> None:
        raise AssertionError("it is not computed")


class Body(nn.Module):
    """Puts image vectors in place of image tokens, and hands further arguments down."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decoder, self.last_images = nn.Embedding(10, 4), Decoder(), None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, images: torch.Tensor | None = None,
                more: dict[str, Any] | None = None, return_dict: bool = True, **others: Any) -> None:
        self.last_images = images
        embeds = self.embed(input_ids)
        if images is not None:
            embeds = embeds.masked_scatter((input_ids == IMAGE)[..., None], images)
        self.decoder(**{EMBEDS: embeds, "position_ids": position_ids, "attention_mask": None} | (more or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *, is_first_iteration: bool,
                                      **kwargs: Any) -> dict[str, Any]:
        assert is_first_iteration and "cache" not in kwargs
        return {"input_ids": input_ids, "logits_to_keep": 1, **kwargs}

    def forward(self, **inputs: Any) -> None:
        self.model(**inputs)


def made(model: Model, images: torch.Tensor | None = None, counted: torch.Tensor | None = COUNTED,
         **more: Any) -> Any:
    images = torch.arange(16.0).view(4, 4) if images is None else images
    return record(model, "model.decoder", "model", [AttentionMask(None)], IDS, LENGTHS,
                  {"position_ids": counted, "images": images, "more": more, "cache": object()}, FedContents())


@torch.no_grad()
def test_rows_runs_and_positions():
    model = Model()
    first, second = made(model)
    assert isinstance(first, FedPrompt) and isinstance(second, FedPrompt)
    assert first.ids == [1, IMAGE, IMAGE, 2] and second.ids == IDS[1].tolist()
    assert [(run.first, run.end) for run in first.runs] == [(1, 3)]
    assert [(run.first, run.end) for run in second.runs] == [(1, 2), (3, 4)]
    assert first.runs[0].rows[EMBEDS].tolist() == torch.arange(8.0).view(2, 4).tolist()
    assert first.positions is None and not first.sights
    assert model.model.last_images is None and type(model.model.decoder) is Decoder


@torch.no_grad()
def test_equal_rows_have_one_prompt():
    """Which makes the keys of its blocks once."""
    ids, counted = IDS[[1, 1, 1]], COUNTED[[1, 1, 1]]
    images = torch.arange(8.0).view(2, 4)[[0, 1, 0, 1, 1, 0]]
    kwargs = {"position_ids": counted, "images": images}
    found = record(Model(), "model.decoder", "model", [AttentionMask(None)], ids, [6, 6, 6], kwargs, FedContents())
    assert isinstance(found, list) and found[0] is found[1] is not found[2]


@torch.no_grad()
def test_positions_are_those_of_the_call_whatever_its_caller_writes_later():
    """A streamer, for instance: stock reads them before the first token."""
    counted = COUNTED[None].repeat(3, 1, 1) * 2
    prompts = made(Model(), counted=counted)
    expected = [prompt.positions.copy() for prompt in prompts]
    counted += 17
    for prompt, own in zip(prompts, expected, strict=True):
        assert (prompt.positions == own).all()


@torch.no_grad()
def test_a_row_whose_vectors_are_those_of_its_ids_is_text():
    model = Model()
    images = model.model.embed.weight[IMAGE].repeat(4, 1)
    images[2] += 1
    assert made(model, images)[0] is None and len(made(model, images)[1].runs) == 1


@torch.no_grad()
def test_adds_belong_to_the_visual_tokens_of_each_row():
    """A token may have the vector of its id, and adds."""
    model, visual = Model(), IDS == IMAGE
    visual[0, 5] = True
    adds = [torch.arange(5.0)[:, None].repeat(1, 4) + layer / 10 for layer in range(2)]
    first, second = made(model, **{DEEPSTACK: adds, MASK: visual})
    assert [run.end - run.first for run in first.runs] == [3]
    assert first.runs[0].rows[DEEPSTACK][:, :, 0].tolist() == [[n, n + adds[1][0, 0]] for n in (0, 1, 2)]
    assert [run.rows[DEEPSTACK][0, 0, 0].item() for run in second.runs] == [3, 4]


@torch.no_grad()
def test_positions_of_axes():
    axes = torch.stack([COUNTED, COUNTED * 2])
    first, second = made(Model(), counted=axes, position_ids=axes)
    assert first.positions.tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]] and second.positions.shape == (2, 6)


@pytest.mark.parametrize(("more", "what"), [
    ({"cross_attention_states": torch.ones(1)}, "cross_attention_states"),
    ({"output_attentions": True}, "output_attentions"),
    ({EMBEDS: None}, "no vector for each token"),
    ({EMBEDS: torch.ones(2, 7, 4)}, "no vector for each token"),
    ({"position_ids": torch.ones(6)}, "positions of shape (6,)"),
    ({"position_ids": COUNTED + 1}, "positions from which `generate` does not go on"),
    ({"position_ids": COUNTED[None]}, "positions from which `generate` does not go on"),
    ({MASK: IDS == IMAGE}, "what to add behind layers without places, or places alone"),
    ({"attention_mask": "mask"}, "a mask of type str"),
])
@torch.no_grad()
def test_what_is_not_known_is_a_reason(more, what):
    found = made(Model(), **more)
    assert isinstance(found, Reason) and found == f"images of a model whose decoder is given {what}"


@torch.no_grad()
def test_what_makes_no_difference():
    assert isinstance(made(Model(), use_cache=True, output_attentions=False, logits_to_keep=0, labels=None), list)
    assert isinstance(made(Model(), counted=None, position_ids=COUNTED), list)


@torch.no_grad()
def test_a_wrapper_of_the_forward_on_the_instance_is_not_run():
    """As accelerate's: it is bound to the model itself, whose decoder computes."""
    model = Model()
    model.forward, model.model.forward = model.forward, model.model.forward
    assert isinstance(made(model)[0], FedPrompt)


def test_a_forward_that_does_not_come_to_its_decoder():
    class Silent(Body):
        def forward(self, **inputs: Any) -> None:
            pass

    model = Model()
    model.model = Silent()
    with pytest.raises(LookupError, match=r"does not call model\.decoder"):
        made(model)
