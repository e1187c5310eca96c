"""Which layers are computed by our kernels, and which are called as they stand."""

import torch
from support import random_prompts, tiny_model
from torch import nn

import hf_paged
from hf_paged.kernels.layer.linear import linear
from hf_paged.models.layer_ops import apply_linear, is_plain_linear


class Own(nn.Linear):
    pass


def test_only_a_bare_linear_layer_is_plain():
    assert is_plain_linear(nn.Linear(4, 4))
    hooked, patched, frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    assert is_plain_linear(frozen)
    assert not any(map(is_plain_linear, (hooked, patched, Own(4, 4), nn.Identity())))


def test_what_is_not_plain_is_called():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    assert torch.equal(apply_linear(layer, x, linear), layer(x))
    layer.register_forward_hook(lambda module, args, output: output * 0)
    assert not apply_linear(layer, x, linear).any()


def test_a_hook_that_comes_between_two_steps_is_called():
    """Eager steps see it at once; a captured one when the next prompt arrives (docs/design/limits.md)."""
    model = tiny_model()
    calls: list[int] = []
    stream = hf_paged.PagedGenerator(model).stream(random_prompts([5]), max_new_tokens=6, eos_token_id=None)
    for step, _ in enumerate(stream):
        if step == 1:
            model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    assert calls
