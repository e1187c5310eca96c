"""LoRA on experts' weights over two ranks: the tokens of PEFT's own model, whatever its adapters do between calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from lora_models import with_expert_adapter
from ranks import run_ranks
from support import random_prompts, stock_generate

from hf_paged import PagedGenerator

PROMPTS = random_prompts([5, 17, 40, 33])
NEW = 8
# A fused family, one of whose layers has no experts, and classes whose blocks run by their modules.
MODELS = {
    "qwen3-moe-mixed": lambda: family_model("qwen3-moe-mixed"),
    "mixtral": lambda: family_model("mixtral"),
    "Glm4Moe": lambda: derived_model("Glm4Moe", CLASSES["Glm4Moe"][0]),
}


def tokens_of(model: Any) -> list[list[int]]:
    return [stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=NEW)[0, len(prompt) :].tolist()
            for prompt in PROMPTS]


def wrapped_model(name: str) -> Any:
    model = MODELS[name]()
    for adapter, seed, options in (("red", 5, {"r": 4}), ("blue", 6, {"r": 2, "use_rslora": True})):
        model = with_expert_adapter(model, adapter, seed, targets=("q_proj", "o_proj"), scale=0.3, **options)
    return model


@torch.no_grad()
def train(model: Any) -> None:
    for key, parameter in model.named_parameters():
        if ".blue." in key:
            parameter += 0.05


class Case:
    """A model with adapters "red" and "blue", its folder, and PEFT's tokens by the names of active adapters."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        MODELS[name]().save_pretrained(folder / "base")
        wrapped = wrapped_model(name)
        wrapped.save_pretrained(folder)
        self.tokens: dict[tuple[str, ...], list[list[int]]] = {}
        for names in ((), ("red",), ("blue",), ("red", "blue")):
            wrapped.base_model.set_adapter(list(names))
            self.tokens[names] = tokens_of(wrapped)
        train(wrapped)
        wrapped.set_adapter("blue")
        self.tokens["trained",] = tokens_of(wrapped)
        self.state = peft.get_peft_model_state_dict(wrapped, adapter_name="blue")
        assert all(a != b for i, a in enumerate(self.tokens.values()) for b in list(self.tokens.values())[:i])


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["sharded", "one process"])
def generator(request: pytest.FixtureRequest, case: Case) -> Iterator[PagedGenerator]:
    ranks = {"tensor_parallel_size": 2} if request.param == "sharded" else {}
    with PagedGenerator.from_pretrained(case.folder / "base", device="cpu", num_blocks=64, strict=True,
                                       **ranks) as made:
        yield made


def made(generator: PagedGenerator) -> list[list[int]]:
    return [one.token_ids for one in generator.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)]


@pytest.mark.slow
def test_loaded_switched_trained_and_deleted(case: Case, generator: PagedGenerator) -> None:
    generator.load_adapter("red", case.folder / "red")
    assert made(generator) == case.tokens[()]  # a loaded adapter is not active
    generator.set_adapter("red")
    assert made(generator) == case.tokens["red",]
    generator.load_adapter("blue", peft.load_peft_weights(str(case.folder / "blue")),
                           peft.PeftConfig.from_pretrained(case.folder / "blue"))
    assert made(generator) == case.tokens["red",]
    for names in (["red", "blue"], ["blue"], [], ["blue"]):
        generator.set_adapter(names)
        assert made(generator) == case.tokens[tuple(names)]
    with pytest.raises(ValueError, match="is not run for single rows"):
        generator.generate(PROMPTS, adapter_names="red")
    found = {key: tensor for key, tensor in generator.named_weights() if ".blue." in key}
    saved = peft.load_peft_weights(str(case.folder / "blue"))
    assert {f"base_model.model.{key.replace('.blue.', '.')}": tensor.shape for key, tensor in found.items()} == {
        key: tensor.shape for key, tensor in saved.items()}
    assert all(torch.equal(tensor, saved[f"base_model.model.{key.replace('.blue.', '.')}"])
               for key, tensor in found.items())
    trained = {key.removeprefix("base_model.model.").replace(".weight", ".blue.weight"): tensor
               for key, tensor in case.state.items()}
    generator.load_weights(trained, partial=True)
    assert made(generator) == case.tokens["trained",]
    generator.delete_adapter("blue")
    assert made(generator) == case.tokens[()]  # and no other adapter is active now
    generator.set_adapter("red")
    assert made(generator) == case.tokens["red",]
    generator.delete_adapter("red")
    assert made(generator) == case.tokens[()]
    assert len(list(generator.named_weights())) == len(MODELS[case.name]().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3-moe-mixed"], indirect=True)
def test_where_every_rank_runs_the_script(case: Case) -> None:
    """With PEFT's own methods of layers, and an optimizer's writes into each rank's part."""
    for found in run_ranks("expert_rank_checks:adapters_between_calls", 2, str(case.folder), PROMPTS, NEW):
        assert found == [case.tokens[()], case.tokens["red",], case.tokens["red", "blue"], case.tokens["blue",],
                         case.tokens["trained",], case.tokens[()]]
