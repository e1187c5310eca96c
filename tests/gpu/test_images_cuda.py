"""On a GPU: calls with images give stock's tokens in fp32; their decode steps run in graphs, beside those of text, and
equal images run through the tower once."""

from __future__ import annotations

import pytest
import torch
from image_calls import image_call, seeing_model
from on_gpu import assert_among_the_best, cuda, gaps
from recurrent_models import with_idiom
from support import assert_native_parity, stock_copy, stock_generate

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.models.executor import view_of
from hf_paged.models.images import tower_attention
from hf_paged.models.images.tower_attention import TowerAttention

pytestmark = pytest.mark.gpu
STATES = [pytest.param(name, marks=with_idiom) for name in ("qwen3.5", "lfm2-vl")]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "smolvlm", "llava-next", "gemma3", "gemma4", *STATES])
def test_fp32_equals_stock(name, enforce_eager):
    """In chunks; the second time with prefix hits, and with graphs that the first call captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = seeing_model(name)
    rows = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["4", 20]]
    calls = [cuda(image_call(model, some)) for some in (rows, rows[1:2], rows)]
    model.cuda()
    expected = [stock_generate(model, **call, max_new_tokens=24) for call in calls]
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager, max_num_batched_tokens=64, max_num_seqs=16)
    for call, stocks in zip(calls, expected, strict=True):
        assert_native_parity(model, stocks, **call, max_new_tokens=24)
    stats = hf_paged.get_engine(model).stats()
    assert stats.prefix_cache_hits > 0 and (stats.num_graphs_captured > 0) is not enforce_eager


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "smolvlm", "gemma3", "internvl", "llava"])
def test_equal_images_run_through_the_tower_once(name):
    """Until a byte of a weight changes, also where no version counter is raised."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = seeing_model(name)
    rows = [[15, "0", 6]] * 3 + [[15, "4", 6]] * 3
    call = cuda(image_call(model, rows)) | {"max_new_tokens": 12}
    model.cuda()
    hf_paged.enable(model, strict=True)
    engine, counts = hf_paged.get_engine(model), []
    for _ in range(2):
        expected = stock_generate(stock_copy(model), **call)
        for _ in range(2):
            assert_native_parity(model, expected, **call)
            stats = engine.stats()
            counts.append((stats.num_images_encoded, stats.num_images_reused))
        weight = next(weight for key, weight in model.named_parameters() if "vis" in key and weight.ndim > 1)
        weight.data.neg_()
    # The first time also those that prove the encoder.
    assert counts == [(2 + 3, 4), (2 + 3, 4 + 6), (2 + 3 + 2, 4 + 6 + 4), (2 + 3 + 2, 4 + 6 + 4 + 6)]
    assert stats.image_bytes > 0
    engine.release_memory()
    assert engine.stats().image_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_encoders_are_proved_in_lower_precision(dtype):
    for name in ("qwen2.5-vl", "gemma3", "internvl"):
        model = seeing_model(name)
        call = image_call(model, [[15, "0", 6], [15, "4", 6]] * 2)
        model.cuda().to(dtype)
        hf_paged.enable(model, strict=True)
        model.generate(**cuda(call), max_new_tokens=2)
        assert hf_paged.get_engine(model).stats().num_images_reused == 2, name


@with_idiom
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_packed_prompts_are_fed_by_kernels(enforce_eager, monkeypatch):
    """In bf16, with heads of published models; rounding may turn a choice between two close tokens. The second time
    from snapshots."""
    model = seeing_model("qwen3.5", linear_key_head_dim=128, linear_value_head_dim=128)
    rows = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["4", 20], [70, "2", 5]]
    calls = [image_call(model, some) for some in (rows, *([row] for row in rows))]
    whole, *single = map(cuda, calls)
    model.cuda().to(torch.bfloat16)
    stock, packed, hidden_states = stock_copy(model), [], RecurrentExecutor.hidden_states

    def watched(self, input_ids, step):
        packed.append(len(step.parts[0][2].slots) if step.row_lengths is None and step.fed is not None else 0)
        return hidden_states(self, input_ids, step)

    monkeypatch.setattr(RecurrentExecutor, "hidden_states", watched)
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager)
    worse = []
    for _ in range(2):
        tokens = model.generate(**whole, max_new_tokens=24)[:, -24:]
        for call, new in zip(single, tokens, strict=True):
            more = {name: torch.cat([call[name], new[None]], 1) if name == "input_ids" else torch.nn.functional.pad(
                call[name], (0, 24), value=int(name == "attention_mask")) for name in call
                if name in ("input_ids", "attention_mask", "mm_token_type_ids")}
            with torch.no_grad():
                logits = stock(**call | more).logits[0, -25:-1].float()
            worse += gaps(logits, new)
    assert_among_the_best(worse)
    assert max(packed) > 1
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava", "gemma3", STATES[0]])
def test_chats_of_a_generator_equal_stock(name):
    """In fp32, beside text; what prompts are fed lies on the host, and is pinned, until their steps take it."""
    pytest.importorskip("PIL", reason="reads images")
    from image_processors import image, model_of, processor, stock_answer, user

    torch.backends.cuda.matmul.allow_tf32 = False
    made = processor(name)
    model = model_of(made, name).cuda()
    chats = [[user("what ", image(1), "?")], [{"role": "user", "content": "hello"}],
             [user(image(1), " or ", image(2, 16, 24))], [user("what ", image(3), "?")]]
    expected = [stock_answer(model, made, chat, max_new_tokens=24) for chat in chats]
    assert expected[0] != expected[3]
    with PagedGenerator(model, made, max_num_batched_tokens=64, max_num_seqs=16, num_blocks=200) as generator:
        for _ in range(2):
            completions = generator.generate(chats, max_new_tokens=24)
            assert [(one.prompt_token_ids, one.token_ids) for one in completions] == expected
        stats = generator.engine.stats()
        assert stats.prefix_cache_hits > 0 and stats.num_graphs_captured > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v", "kimi-k2.5"])
@torch.no_grad()
def test_towers_that_attend_at_once_are_as_exact_as_stocks(name, dtype, monkeypatch):
    """Against float64, for which there is no kernel."""
    launched, attend = [], tower_attention.windowed_attention
    monkeypatch.setattr(tower_attention, "windowed_attention", lambda *given: launched.append(1) or attend(*given))
    torch.backends.cuda.matmul.allow_tf32 = False
    model = seeing_model(name)
    call = image_call(model, [["0", 4, "1", 2, "2"]])
    images = {key: call[key].cuda() for key in ("pixel_values", "image_grid_thw")}

    def rows(attention=None):
        view = view_of(model.model, {})
        encode = view.get_image_features if attention is None else attention.through(view.get_image_features, view)
        cast = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in images.items()}
        return torch.cat(list(encode(**cast).pooler_output)).double()

    model.cuda().to(dtype)
    stock, own = rows(), rows(TowerAttention())
    assert launched
    model.double()  # of the weights as they were rounded
    exact = rows()
    assert (own - exact).norm() <= 1.2 * (stock - exact).norm()
