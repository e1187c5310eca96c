"""Towers that attend window by window: all windows of a layer at once, by views that nothing else sees.

On the CPU here, where an engine leaves towers as they are: a launch is the reference, of which each window is stock's.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from image_calls import image_call, seeing_model
from image_models import WITH_STATES
from recurrent_models import with_idiom
from support import assert_native_parity, stock_generate
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

import hf_paged
from hf_paged.kernels.attention.windowed import windowed_attention_triton
from hf_paged.models.executor import view_of
from hf_paged.models.images import tower_attention
from hf_paged.models.images.tower_attention import TowerAttention, tower_launches

# By model: how many layers of its tower attend by windows.
LAYERS = {"qwen2-vl": 2, "qwen2.5-vl": 2, "qwen3-vl": 3, "qwen3-vl-moe": 3, "qwen3.5": 2, "qwen3.5-moe": 2, "glm4v": 2,
          "kimi-k2.5": 2, "lfm3-vl": 1, "minicpm-v-4.6": 3}
IMAGES = [[3, "0", 4, "1"], [2, "2"]]


@pytest.fixture
def launched(monkeypatch):
    """Numbers of windows of the launches that would be made on a GPU."""
    launched, attend = [], tower_attention.windowed_attention

    def counted(q, k, v, windows, scale):
        launched.append(len(windows.starts) - 1)
        return attend(q, k, v, windows, scale)

    monkeypatch.setattr(tower_attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(tower_attention, "windowed_attention", counted)
    return launched


class CountsWindows(TorchFunctionMode):
    """Counts calls of sdpa."""

    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is nn.functional.scaled_dot_product_attention
        return func(*args, **kwargs or {})


def images_of(model: Any) -> dict[str, Any]:
    """Return the arguments of the tower for IMAGES."""
    return {name: value for name, value in image_call(model, IMAGES).items()
            if name not in ("input_ids", "attention_mask", "mm_token_type_ids")}


def encoded(model: Any, attention: TowerAttention | None = None, images: dict[str, Any] | None = None,
            **changed: Any) -> torch.Tensor:
    """Return what the tower makes of images, by default of IMAGES, as stock or by views."""
    view = view_of(model.model, {})
    encode = view.get_image_features if attention is None else attention.through(view.get_image_features, view)
    return torch.cat(list(encode(**images or images_of(model), **changed, return_dict=True).pooler_output))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[with_idiom] * (name in WITH_STATES)) for name in LAYERS])
@torch.no_grad()
def test_each_class_attends_at_once(name, launched):
    """The first layer once more by stock, which proves the class; in the next run each layer makes one launch."""
    model, attention, counts = seeing_model(name), TowerAttention(), []
    expected, images = encoded(model), images_of(model)
    for _ in range(2):
        launched.clear()
        with CountsWindows() as by_windows:
            assert torch.equal(encoded(model, attention, images), expected)
        assert len(launched) == LAYERS[name]
        counts.append(by_windows.num_calls - sum(launched))
    assert [*attention._proved.values()] == [True]
    assert counts == [launched[0], 0]


@pytest.mark.interpreted
@torch.no_grad()
def test_the_kernel_makes_the_same_but_for_rounding(launched, monkeypatch):
    model = seeing_model("qwen2.5-vl")
    monkeypatch.setattr(tower_attention, "windowed_attention", windowed_attention_triton)
    torch.testing.assert_close(encoded(model, TowerAttention()), encoded(model), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_classes_and_a_cpu_stay_as_they_are(launched, monkeypatch):
    model = seeing_model("smolvlm")
    assert torch.equal(encoded(model, TowerAttention()), encoded(model)) and launched == []
    monkeypatch.undo()
    model = seeing_model("qwen2.5-vl")
    monkeypatch.setattr(tower_attention, "windowed_attention", None)
    assert torch.equal(encoded(model, TowerAttention()), encoded(model))


@pytest.mark.parametrize(("long", "num_launched"), [(9, 0), (17, 1), (41, 2)])
@torch.no_grad()
def test_few_long_windows_are_stocks(long, num_launched, launched, monkeypatch):
    """Here of 16 tokens, and in the second layer, of whole images, of 40 on average."""
    model, attention = seeing_model("qwen2.5-vl"), TowerAttention()
    pixels = torch.randn(80, 96, generator=torch.Generator().manual_seed(0))
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8], [1, 6, 8]])}
    monkeypatch.setattr(tower_attention, "LONG", long)
    assert torch.equal(encoded(model, attention, images), encoded(model, None, images))
    assert len(launched) == num_launched


@torch.no_grad()
def test_what_is_cast_by_autocast_attends_in_its_dtype(launched):
    model, attention = seeing_model("qwen3-vl"), TowerAttention()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoded(model, attention), encoded(model)) and len(launched) == 3


def eager(model):
    model.model.visual.set_attn_implementation("eager")


def hooked(model):
    model.model.visual.blocks[0].register_forward_hook(lambda *_: None)
    model.model.visual.blocks[1].attn.qkv.register_forward_pre_hook(lambda *_: None)


def wrapped(model):
    visual = model.model.visual
    visual.forward = visual.forward


def dropping(model):
    for block in model.model.visual.blocks:
        block.attn.train().attention_dropout = 0.5


@pytest.mark.parametrize("change", [eager, hooked, wrapped, dropping])
@torch.no_grad()
def test_another_tower_makes_its_own_calls(change, launched):
    model = seeing_model("qwen2.5-vl")
    change(model)
    torch.manual_seed(0)
    expected = encoded(model)
    torch.manual_seed(0)
    assert torch.equal(encoded(model, TowerAttention()), expected) and launched == []


@torch.no_grad()
def test_hooks_that_only_capture_stay(launched):
    """transformers leaves them behind a forward with attentions, which sdpa has none of."""
    model = seeing_model("qwen2.5-vl")
    encoded(model, output_attentions=True)
    assert model.model.visual.blocks[0].attn._forward_hooks
    encoded(model, TowerAttention())
    assert len(launched) == 2


def test_with_gradients_stock_runs(launched):
    model = seeing_model("qwen2.5-vl")
    assert encoded(model, TowerAttention()).requires_grad and launched == []


@torch.no_grad()
def test_nobody_else_sees_it(launched, monkeypatch):
    """Neither the config, another thread's forward, nor, behind an interrupt, the view."""
    model, attention, seen = seeing_model("qwen2.5-vl"), TowerAttention(), []
    expected, attend = encoded(model), tower_attention.windowed_attention

    def elsewhere():
        with torch.no_grad():
            count = len(launched)
            seen.append((model.config.vision_config._attn_implementation, model.model.visual.blocks[0].attn.config
                         is model.config.vision_config, torch.equal(encoded(model), expected), len(launched) == count))

    def watched(*args):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return attend(*args)

    monkeypatch.setattr(tower_attention, "windowed_attention", watched)
    encoded(model, attention)
    assert seen == [("sdpa", True, True, True)] * 2

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tower_attention, "windowed_attention", interrupted)
    view = view_of(model.model, {})
    inside = view._modules
    call = image_call(model, IMAGES)
    with pytest.raises(KeyboardInterrupt):
        attention.through(view.get_image_features, view)(call["pixel_values"], call["image_grid_thw"])
    assert view._modules is inside and view.visual is model.model.visual


class Attention(nn.Module):
    """Attends by windows as transformers' classes do, if ``has_same`` is right; ``reads``: further arguments."""

    def __init__(self, has_same: bool, **reads: Any) -> None:
        super().__init__()
        self.config = PreTrainedConfig(attn_implementation="sdpa")
        self.factor, self.reads, self.is_causal = 1.0 if has_same else 1.5, reads, False

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        x = hidden_states.view(1, len(hidden_states), 2, -1).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        options = {"attention_mask": None, "is_causal": False} | self.reads
        if is_flash_attention_requested(self.config):
            found = attend(self, x, self.factor * x, x, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens,
                           **options)[0]
        else:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            found = torch.cat([attend(self, part, part, part, **options)[0] for part in x.split(lengths, 2)], 1)
        return found.flatten(2)[0]


class Body(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.tower = attention

    def encode(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.tower(x, cu_seqlens=starts)


X, STARTS = torch.randn(10, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 10])


@pytest.mark.parametrize(("module", "num_launched"), [
    (Attention(True), 2), (Attention(False), 1), (Attention(True, is_causal=True), 0),
    (Attention(True, dropout=0.5), 0), (Attention(True, scaling=-1.0), 0),
    (Attention(True, attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)), 0),
    (Attention(True, position_bias=torch.ones(1, 2, 1, 1)), 0),
], ids=["same", "otherwise", "causal", "dropout", "scale", "mask", "bias"])
@torch.no_grad()
def test_a_class_is_proved(module, num_launched, launched):
    """One that makes something else for FlashAttention is found out by its first call."""
    attention = TowerAttention()
    for _ in range(2):
        body = Body(module)
        torch.manual_seed(0)
        expected = body.encode(X, STARTS)
        torch.manual_seed(0)
        view = view_of(body, {})
        assert torch.equal(attention.through(view.encode, view)(X, STARTS), expected)
    assert len(launched) == num_launched


@pytest.mark.parametrize(("first", "starts"), [
    (torch.ones(10, 32), STARTS), (torch.repeat_interleave(X[:2], torch.tensor([4, 6]), 0), STARTS),
    (X, torch.arange(11)), (torch.full_like(X, torch.nan), STARTS),
], ids=["blank", "two-blank", "windows-of-one", "nan"])
@torch.no_grad()
def test_what_comes_out_whatever_the_scores_proves_nothing(first, starts, launched):
    """Neither that a class makes the same, nor that it makes something else."""
    for has_same, proved in ((False, False), (True, True)):
        body, attention = Body(Attention(has_same)), TowerAttention()
        for x, ends in ((first, starts), (X, STARTS)):
            view = view_of(body, {})
            made, expected = attention.through(view.encode, view)(x, ends), body.encode(x, ends)
            assert torch.equal(made.nan_to_num(), expected.nan_to_num())
        assert [*attention._proved.values()] == [proved]


@pytest.mark.parametrize("starts", [[0, 4, 11], [0, 12, 10]])
@torch.no_grad()
def test_stocks_own_error_is_raised(starts, launched):
    body, errors = Body(Attention(True)), []
    for encode in (body.encode, TowerAttention().through((view := view_of(body, {})).encode, view)):
        with pytest.raises(RuntimeError) as raised:
            encode(X, torch.tensor(starts))
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and launched == []


def test_generate_attends_at_once(launched):
    model = seeing_model("qwen2.5-vl")
    call = image_call(model, IMAGES) | {"max_new_tokens": 6}
    expected = stock_generate(model, **call)
    hf_paged.enable(model, strict=True)
    counts = []
    for _ in range(3):
        assert_native_parity(model, expected, **call)
        counts.append(len(launched))
    assert counts == [2, 4, 4]  # the second time for the proof that images may be kept


def test_launches_ahead_are_those_of_each_head_size(launched):
    model = seeing_model("qwen2.5-vl").to(torch.bfloat16)
    for launch in tower_launches(model, torch.device("cpu")):
        launch()
    assert launched == [1, 1]
    for block in model.model.visual.blocks:  # as bitsandbytes holds four bits
        block.attn.qkv.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert [launch.args[0].dtype for launch in tower_launches(model, torch.device("cpu"))] == [torch.bfloat16] * 2
    assert list(tower_launches(model.double(), torch.device("cpu"))) == []
    assert list(tower_launches(seeing_model("llava"), torch.device("cpu"))) == []
