"""Calls and chats with images over two ranks: stock's tokens of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_calls import image_call, seeing_model
from image_processors import image, model_of, processor, stock_answer, user
from ranks import run_ranks
from support import stock_generate

from hf_paged import PagedGenerator
from hf_paged.models.images.decoder_inputs import handed_over
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import shard_of
from hf_paged.parallel.loading import load

NEW = {"max_new_tokens": 8, "do_sample": False}
TEXT = [{"role": "user", "content": "hello there"}]
ONE = [user("what is ", image(1), "?")]
TWO = [{"role": "system", "content": "be brief"}, user(image(1), " or ", image(2, 16, 24), "?")]
CHATS = [ONE, TEXT, TWO, [user("what is ", image(3), "?")]]
# Positions on three axes, tokens that see later ones, adds behind layers with experts, and towers with tensors of more
# than two dimensions and with embeddings.
NAMES = ("qwen2.5-vl", "gemma3", "qwen3-vl-moe", "internvl", "idefics3")


def calls_of(model: Any) -> list[dict[str, torch.Tensor]]:
    rows = ([[5, "0", 6]], [[5, "4", 6]], [[5, "0", 6], [9], [2, "1", 3, "3", 4]])
    return [image_call(model, row) for row in rows]


@pytest.mark.slow
def test_calls_where_every_rank_runs_the_script(tmp_path: Path) -> None:
    """Rows beside text; and of other pixels, whose prefix has the same ids."""
    calls, expected = {}, {}
    for name in NAMES:
        model = seeing_model(name)
        model.save_pretrained(tmp_path / name)
        calls[name] = calls_of(model)
        expected[name] = [stock_generate(model, **call, **NEW).tolist() for call in calls[name]]
        assert expected[name][0] != expected[name][1]
    for found in run_ranks("image_rank_checks:generate", 2, str(tmp_path), calls, NEW):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3"])
def test_chats_of_a_generator(name: str, tmp_path: Path) -> None:
    """In small chunks; the second time from the prefix cache, and the images from those that were kept."""
    made = processor(name)
    model = model_of(made, name)
    model.save_pretrained(tmp_path)
    expected = [stock_answer(model, made, chat, **NEW) for chat in CHATS]
    assert expected[0][0] == expected[3][0] and expected[0][1] != expected[3][1]
    with PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2, device="cpu", num_blocks=64, tokenizer=made,
                                        max_num_batched_tokens=21, max_num_seqs=4) as generator:
        for _ in range(2):
            found = generator.generate(CHATS, **NEW)
            assert [(one.prompt_token_ids, one.token_ids) for one in found] == expected
            assert [one.has_images for one in found] == [True, False, True, True]
        stats = generator.engine.stats()
        assert stats.prefix_cache_hits > 0 and stats.num_images_reused > 0


@pytest.mark.parametrize("name", ["qwen2.5-vl", "internvl"])
@pytest.mark.parametrize("rank", [0, 1])
@torch.no_grad()
def test_one_rank_alone_records_what_is_fed(name: str, rank: int, tmp_path: Path) -> None:
    """Without the others: the vectors of images are stock's; of text those of this rank."""
    model = seeing_model(name)
    model.save_pretrained(tmp_path)
    part = load(str(tmp_path), ParallelGroup(rank, 2), device="cpu")
    for key, parameter in part.model.named_parameters():
        module = part.model.get_submodule(key.rpartition(".")[0])
        whole = model.model.get_parameter(key)
        assert torch.equal(parameter, shard_of(module, key.rpartition(".")[2]).take(whole)), key
    call = image_call(model, [[5, "0", 6]])
    whole, found = (handed_over(one, "model.language_model", lambda view: view(**call))["inputs_embeds"]
                    for one in (model, part))
    same = (whole == found).all(-1)[0]
    tokens = part.model.get_input_embeddings()
    is_image = call["input_ids"][0] == model.config.image_token_id
    is_own = (call["input_ids"][0] - tokens.first >= 0) & (call["input_ids"][0] - tokens.first < tokens.num_embeddings)
    assert torch.equal(same, is_image | is_own) and is_image.any() and not same.all()
    assert (found[0, ~same] == torch.finfo(found.dtype).max).all()
