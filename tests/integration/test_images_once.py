"""Equal images run through the tower once, within a call and in later ones, and calls have stock's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_calls import image_call, seeing_model, with_log_probabilities
from image_models import END, START, VIDEO
from lora_models import with_adapter
from recurrent_models import with_idiom
from support import assert_falls_back, assert_native_parity, stock_copy, stock_generate
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

import hf_paged
from hf_paged.models.images import known_images

MODELS = ("qwen2.5-vl", "smolvlm", "gemma3", "internvl", "llava")
STATES = pytest.param("qwen3.5", marks=[pytest.mark.slow, with_idiom])
SLOW = [*(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:]), STATES]
NEW = {"max_new_tokens": 6}
# Names that differ by 4 have the same size, and other pixels.
ONE, OTHER = [5, "0", 6], [5, "4", 6]


def counts(model) -> tuple[int, int]:
    stats = hf_paged.get_engine(model).stats()
    return stats.num_images_encoded, stats.num_images_reused


def counted(model, expected: torch.Tensor, call: dict[str, Any]) -> tuple[int, int]:
    """Return how many images a call that has stock's tokens encodes and does not."""
    before = counts(model)
    assert_native_parity(model, expected, **call)
    return counts(model)[0] - before[0], counts(model)[1] - before[1]


def rows_of_tower(call) -> int:
    """Return how many images or patches the tower's first layer gets while `call` runs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    return sum(event.input_shapes[0][0] for event in found.events()
               if event.name == "aten::convolution" and len(event.input_shapes[0]) > 3)  # not of texts


def enabled(model, **options):
    """Enable a model, and have it prove its encoder."""
    hf_paged.enable(model, strict=True, **options)
    model.generate(**image_call(model, [[5, "8", 6]] * 2), max_new_tokens=1)
    return model


@pytest.mark.parametrize("name", [*MODELS, STATES])
def test_a_call_as_trl_makes_it(name):
    """In train mode, with the image of a prompt once for each of its completions."""
    model = seeing_model(name).train()
    call = image_call(model, [[15, "0", 6]] * 3 + [[15, "4", 6]] * 3)
    config = GenerationConfig(do_sample=False, pad_token_id=0, **NEW)
    call |= {"generation_config": config, "disable_compile": True}
    copy = stock_copy(model)
    expected: list[torch.Tensor] = []
    of_stock = rows_of_tower(lambda: expected.append(copy.generate(**call)))
    enabled(model)
    assert rows_of_tower(lambda: expected.append(model.generate(**call))) == of_stock / 3 and of_stock
    assert rows_of_tower(lambda: expected.append(model.generate(**call))) == 0
    assert torch.equal(expected[1], expected[0]) and torch.equal(expected[2], expected[0])
    assert counted(model, expected[0], call) == (0, 6)


@pytest.mark.parametrize("name", ["qwen2.5-vl", *SLOW])
def test_an_encoder_is_proved_the_first_time_alone(name):
    model = seeing_model(name)
    calls = [image_call(model, rows) | NEW for rows in ([ONE, ONE, OTHER], [[5, "8", 6]] * 2)]
    expected = [stock_generate(model, **call) for call in calls]
    hf_paged.enable(model, strict=True)
    assert [counted(model, *each) for each in zip(expected, calls, strict=True)] == [(2 + 3, 1), (1, 1)]


@pytest.mark.parametrize("name", [*MODELS, STATES])
def test_images_of_several_prompts(name):
    """None to four in a prompt, in another order in the second call."""
    model = seeing_model(name)
    rows = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["1", 1, "1", "2", "0"], [4, "0", 7]]
    calls = [image_call(model, each) | NEW for each in (rows, rows[::-1], [[2, "3", 3, "1", 4]])]
    expected = [stock_generate(model, **call) for call in calls]
    enabled(model)
    found = [counted(model, *each) for each in zip(expected, calls, strict=True)]
    if name == "smolvlm":  # a processor pads the images of a prompt, and the class makes one output of them
        # Before 5.24 it makes as many as a prompt has images, so that all images run.
        assert found in ([(4, 1), (0, 5), (1, 0)], [(4 + 5, 0), (0, 0), (0, 0)])
    else:
        assert found == [(4, 4), (0, 8), (0, 2)]


@pytest.mark.parametrize("name", ["qwen2.5-vl", *SLOW])
def test_rows_of_one_prompt(name):
    model = seeing_model(name)
    call = image_call(model, [[15, "0", 6], [3, "4", 6]]) | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    expected = stock_generate(model, **call, **NEW)
    enabled(model)
    encoded, reused = counted(model, expected, call | NEW)
    assert encoded == 2 and reused in (0, 4)  # since 5.24 stock repeats what the tower made of them
    assert counted(model, expected, call | NEW)[0] == 0


@pytest.mark.parametrize("name", ["qwen2.5-vl", *SLOW])
def test_another_image_by_one_bit(name):
    model = enabled(seeing_model(name))
    call = image_call(model, [ONE]) | NEW
    changed = call | {"pixel_values": call["pixel_values"].clone()}
    changed["pixel_values"].view(torch.int32).flatten()[7] ^= 1
    encoded = [counted(model, stock_generate(stock_copy(model), **each), each)[0] for each in (call, changed, call)]
    assert encoded == [1, 1, 0]


@pytest.mark.parametrize("name", ["qwen2.5-vl", *SLOW])
def test_log_probabilities_are_stocks(name):
    """Of images that ran through the tower with others, and of images that did not."""
    model = enabled(seeing_model(name))
    call = image_call(model, [ONE, OTHER, ONE]) | NEW
    stock = stock_copy(model).generate(**call, output_logits=True, return_dict_in_generate=True)
    made = torch.stack(stock.logits, 1).log_softmax(-1)
    of_tokens = made.gather(-1, stock.sequences[:, -NEW["max_new_tokens"]:, None])[..., 0]
    for _ in range(2):
        sequences, found = with_log_probabilities(model, call | NEW)
        assert torch.equal(sequences, stock.sequences) and torch.allclose(torch.tensor(found), of_tokens, atol=1e-4)
    assert counts(model)[1] == 1 + 1 + 3


def of_tower(model) -> dict[str, torch.nn.Parameter]:
    found = {name: weight for name, weight in model.named_parameters() if "vision" in name or "visual" in name}
    assert found
    return found


def last_matrix(model) -> tuple[str, torch.nn.Parameter]:
    """Of the first layer; LLaVA does not run the last one."""
    return [each for each in of_tower(model).items() if each[1].ndim > 1 and ".0." in each[0]][-1]


def in_place(model) -> None:
    for weight in of_tower(model).values():
        weight.mul_(1.3)


def behind_autograd(model) -> None:
    """As fused optimizers write: no version counter is raised."""
    weight = last_matrix(model)[1]
    version = weight._version
    weight.data.neg_()
    assert weight._version == version


def by_state_dict(model) -> None:
    model.load_state_dict({name: weight * 1.3 for name, weight in of_tower(model).items()}, strict=False)


def by_optimizer(model) -> None:
    weights = list(of_tower(model).values())
    for weight in weights:
        weight.grad = weight.detach().sign()
    torch.optim.SGD(weights, lr=0.1, foreach=True).step()
    for weight in weights:
        weight.grad = None


def by_another_tensor(model) -> None:
    name, weight = last_matrix(model)
    module = model.get_submodule(name.rpartition(".")[0])
    setattr(module, name.rpartition(".")[2], torch.nn.Parameter(-weight))


def in_the_projector(model) -> None:
    name = next(name for name, _ in model.named_parameters() if any(
        part in name for part in ("merger", "projector", "connector")) and name.endswith("weight"))
    model.get_parameter(name).data.neg_()


CHANGES = (in_place, behind_autograd, by_state_dict, by_optimizer, by_another_tensor, in_the_projector)


@pytest.mark.parametrize(("name", "change"), [
    *(pytest.param("qwen2.5-vl", change, id=f"qwen2.5-vl, {change.__name__}") for change in CHANGES),
    *(pytest.param(name, change, id=f"{name}, {change.__name__}", marks=pytest.mark.slow)
      for name in MODELS[1:] for change in CHANGES),
])
def test_weights_that_change_between_calls(name, change):
    model = enabled(seeing_model(name))
    call = image_call(model, [ONE, OTHER, ONE]) | NEW
    before = stock_generate(stock_copy(model), **call)
    assert counted(model, before, call) == (2, 1) and counted(model, before, call) == (0, 3)
    with torch.no_grad():
        change(model)
    after = stock_generate(stock_copy(model), **call)
    assert not torch.equal(after, before)
    assert counted(model, after, call) == (2, 1) and counted(model, after, call) == (0, 3)


@pytest.mark.parametrize(("name", "targets"), [
    ("qwen2.5-vl", ["qkv", "gate_proj"]),
    pytest.param("llava", ["linear_1", "linear_2"], marks=pytest.mark.slow),
    pytest.param("gemma3", ["fc1", "fc2"], marks=pytest.mark.slow),
])
def test_adapters_of_the_tower(name, targets):
    model = seeing_model(name)
    wrapped = with_adapter(model, "a", seed=3, targets=targets, scale=0.5)
    with_adapter(wrapped, "b", seed=4, targets=targets, scale=0.5)
    call = image_call(model, [ONE, OTHER, ONE]) | NEW

    def expected() -> torch.Tensor:
        hf_paged.disable(model)
        try:
            return wrapped.generate(**call)
        finally:
            hf_paged.enable(model, strict=True)

    results = []
    for adapter in ("a", "b"):
        wrapped.set_adapter(adapter)
        results.append(expected())
    with wrapped.disable_adapter():
        results.append(expected())
    assert not any(torch.equal(one, other) for one, other in zip(results, [*results[1:], results[0]], strict=True))
    enabled(model)
    for _ in range(2):
        for adapter, made in zip(("a", "b"), results, strict=False):
            wrapped.set_adapter(adapter)
            assert torch.equal(wrapped.generate(**call), made) and torch.equal(wrapped.generate(**call), made)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped.generate(**call), results[2])
    assert counts(model)[1] >= 2 * (1 + 3 + 1 + 3 + 1)
    wrapped.set_adapter("a")
    wrapped.generate(**call)
    wrapped.merge_adapter(["b"])
    merged = wrapped.generate(**call)
    hf_paged.disable(model)
    assert torch.equal(merged, wrapped.generate(**call)) and not torch.equal(merged, results[0])


def test_an_adapter_for_each_row():
    """Equal images of rows with other adapters are others."""
    model = seeing_model("llava")
    wrapped = with_adapter(model, "a", seed=3, targets=["fc1", "fc2"], scale=0.5)
    with_adapter(wrapped, "b", seed=4, targets=["fc1", "fc2"], scale=0.5)
    call = image_call(model, [ONE, ONE]) | NEW | {"adapter_names": ["a", "b"]}
    expected = wrapped.generate(**call)
    assert not torch.equal(*expected)
    enabled(model)
    before = counts(model)
    assert torch.equal(wrapped.generate(**call), expected) and counts(model) == before


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.slow)
                                              for name in ("llava", "internvl"))])
def test_a_tower_that_drops_out_in_train_mode(name):
    """Each image has numbers of its own, also of equal ones, and seeds give stock's."""
    model = seeing_model(name).train()
    for key, module in model.named_modules():
        for attribute in ("dropout", "attention_dropout"):
            if ("vision" in key or "visual" in key) and isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.5)
    model.config.vision_config.attention_dropout = 0.5
    call = image_call(model, [ONE, OTHER, ONE]) | NEW
    copy = stock_copy(model)
    torch.manual_seed(3)
    expected = [copy.generate(**call) for _ in range(3)]
    assert not torch.equal(expected[0], expected[1])
    torch.manual_seed(3)
    hf_paged.enable(model)
    assert [torch.equal(model.generate(**call), each) for each in expected] == [True] * 3
    if name == "internvl":  # whose calls go to stock
        assert counts(model) == (0, 0)
        return
    # The first call shows that the numbers are random, over the two images that differ.
    assert counts(model) == (2 + 3 * 3, 0)
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    model.config.vision_config.attention_dropout = 0.0
    expected = [stock_generate(stock_copy(model), **call)] * 2
    assert [counted(model, each, call) for each in expected] == [(3, 0), (2, 3)]  # and the proof


@pytest.mark.parametrize("name", ["gemma3", pytest.param("internvl", marks=pytest.mark.slow)])
def test_autocast_is_another_model(name):
    model = seeing_model(name)
    call = image_call(model, [ONE]) | NEW
    copy = stock_copy(model)
    enabled(model)
    for _ in range(2):
        for cast in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                assert torch.equal(model.generate(**call), copy.generate(**call))


def test_released_memory_and_other_limits(monkeypatch):
    model = enabled(seeing_model("qwen2.5-vl"))
    engine, call = hf_paged.get_engine(model), image_call(model, [ONE]) | NEW
    expected = stock_generate(stock_copy(model), **call)
    assert counted(model, expected, call) == (1, 0) and counted(model, expected, call) == (0, 1)
    assert engine.stats().image_bytes >= call["pixel_values"].nbytes
    engine.release_memory()
    assert engine.stats().image_bytes == 0
    assert counted(model, expected, call) == (1, 0) and counted(model, expected, call) == (0, 1)
    monkeypatch.setattr(known_images, "MOST_BYTES", call["pixel_values"].nbytes - 1)
    hf_paged.disable(model)
    enabled(model)
    assert counted(model, expected, call) == (1, 0) and counted(model, expected, call) == (1, 0)
    hf_paged.disable(model)
    enabled(model, enable_prefix_caching=False)
    twice = image_call(model, [ONE, ONE]) | NEW
    expected = stock_generate(stock_copy(model), **twice)
    assert counted(model, expected, twice) == (1, 1) and counted(model, expected, twice) == (1, 1)


def test_hooks_of_the_tower_see_all_images():
    model = enabled(seeing_model("gemma3"))
    call = image_call(model, [ONE, ONE]) | NEW
    model.generate(**call)
    seen: list[int] = []
    hook = model.model.vision_tower.register_forward_hook(lambda module, args, output: seen.append(len(output[0])))
    hf_paged.disable(model)
    before = stock_generate(model, **call)
    del seen[:]
    assert_falls_back(model, "forward hook", **call)
    assert seen and set(seen) == {2}
    hook.remove()
    assert_native_parity(enabled(model), before, **call)


def test_calls_that_run_in_stock_or_not_at_all():
    model = enabled(seeing_model("qwen2.5-vl"))
    call = image_call(model, [ONE, ONE]) | NEW
    before = counts(model)
    assert hf_paged.explain(model, **call).path == "native"
    assert counts(model) == before
    hf_paged.disable(model)
    assert_falls_back(model, "use_cache=False", **call, use_cache=False)


def test_videos():
    model = seeing_model("qwen2.5-vl")
    frames = [START, *[VIDEO] * 8, END]
    call = image_call(model, [[3, frames, 4], [5, frames, 4]])
    call["mm_token_type_ids"] += 2 * (call["input_ids"] == VIDEO)
    pixels = torch.randn(32, 96, generator=torch.Generator().manual_seed(9))
    call |= {"video_grid_thw": torch.tensor([[2, 4, 4]] * 2), "pixel_values_videos": torch.cat([pixels, pixels]),
             "second_per_grid_ts": torch.tensor([1.0, 2.0])} | NEW
    expected = stock_generate(model, **call)
    hf_paged.enable(model, strict=True)
    assert counted(model, expected, call) == (1 + 2, 1) and counted(model, expected, call) == (0, 2)
