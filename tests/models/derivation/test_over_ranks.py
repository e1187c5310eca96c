"""What is proved of a rank's part of a derived class, on the meta device; tests/parallel has ranks that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derived_models import CLASSES, HALF_ROTARY, LATENT, ROUTED, derived_model
from transformers import PreTrainedModel

from hf_paged import UnsupportedModelError
from hf_paged.models import check_over_ranks, find_executor
from hf_paged.models.derivation import deriving, over_ranks
from hf_paged.models.derivation.executor import DerivedExecutor, ModelOutline
from hf_paged.models.derivation.layout import lay_out
from hf_paged.models.proof.verdict import Refused
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.layers import RowParallelLinear
from hf_paged.parallel.plan import parallelize


def part(name: str, settings: dict[str, Any], rank: int = 0, size: int = 2) -> PreTrainedModel:
    model = derived_model(name, settings).to("meta")
    parallelize(model, ParallelGroup(rank, size))
    return model


def outline(model: PreTrainedModel) -> ModelOutline:
    check_over_ranks(model)
    found = deriving.derived(model)
    assert isinstance(found, ModelOutline)
    return found


@pytest.mark.parametrize(("name", "settings", "size", "heads"), [
    ("Cohere", {"logit_scale": 0.3}, 2, (2, 1)),
    ("Cohere", {"logit_scale": 0.3}, 4, (1, 1)),  # a head of keys is on two ranks
    pytest.param("GPTNeoX", {"rope_parameters": HALF_ROTARY}, 2, (2, 2), marks=pytest.mark.slow),
    pytest.param("DeepseekV2", LATENT | ROUTED, 2, (2, 2), marks=pytest.mark.slow),
    pytest.param("Olmoe", CLASSES["Olmoe"][0], 2, (4, 2), marks=pytest.mark.slow),  # each rank attends by all heads
])
def test_heads_of_a_rank(name: str, settings: dict[str, Any], size: int, heads: tuple[int, int]) -> None:
    model = part(name, settings, size - 1, size)
    found = outline(model)
    assert {(call.num_heads, call.num_kv_heads) for call in found.calls} == {heads}
    executor = find_executor(model)(model)
    assert type(executor) is DerivedExecutor
    spec = executor.kv_spec()
    assert (spec.num_heads, spec.num_kv_heads) == heads
    assert (executor.vocab_size, executor.num_logits, executor.hidden_size) == (256, 256, 64)
    assert executor.group.size == size and executor.constants() == found.constants


def test_one_rank_proves_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    check_over_ranks(part("Cohere", {"logit_scale": 0.3}))
    for name in ("prove", "lay_out", "part_of"):
        monkeypatch.setattr(deriving, name, lambda *args: pytest.fail("made anew"))
    assert outline(part("Cohere", {"logit_scale": 0.3}, rank=1)).model_class.__name__ == "CohereForCausalLM"


def test_a_part_whose_forward_does_not_run_is_refused() -> None:
    """Norms of heads, which the plan leaves whole."""
    with pytest.raises(UnsupportedModelError, match=r"over 2 ranks: Cohere.*: a rank's part does not run \(Runtime"):
        check_over_ranks(part("Cohere", {"use_qk_norm": True}))


def checked(name: str = "Cohere") -> None:
    model = derived_model(name, CLASSES[name][0])
    whole = lay_out(type(model), model.config)
    over_ranks.part_of(whole, type(model), model.config, "sdpa", 2)


@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_a_clone_whose_ranks_do_not_add_up_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked()
    wrong = {"all_reduce": lambda self, tensor: tensor, "all_gather": lambda self, tensor: torch.stack([tensor] * 2)}
    monkeypatch.setattr(over_ranks._Rank, method, wrong[method])
    with pytest.raises(Refused, match="logits of a small clone over 2 ranks differ from the whole clone's by"):
        checked()


def test_a_rank_of_a_clone_that_raises_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RowParallelLinear.forward

    def raises(self: RowParallelLinear, input: torch.Tensor) -> torch.Tensor:
        if self.group.rank == 1:
            raise ArithmeticError("on purpose")
        return forward(self, input)

    model = derived_model("Cohere", CLASSES["Cohere"][0])
    monkeypatch.setattr(RowParallelLinear, "forward", raises)
    with pytest.raises(Refused, match=r"does not run over 2 ranks \(ArithmeticError: on purpose\)"):
        over_ranks._check_clone(type(model), model.config, "sdpa", shares_heads=False)


@pytest.mark.parametrize(("change", "reason"), [
    ({"num_heads": 4}, "attends by 4 and 1 heads of queries and keys on a rank of 2, and by 4 and 2 in the whole"),
    ({"head_dim": 8}, "attends by 2 and 1 heads"),
    ({"module": "model.layers.7"}, "attends in other modules"),
])
def test_calls_that_are_not_those_of_a_ranks_heads(change: dict[str, Any], reason: str) -> None:
    model = derived_model("Cohere", {})
    whole, own = (lay_out(type(model), model.config, size) for size in (1, 2))
    over_ranks._check_part(whole, own, 2)
    over_ranks._check_part(whole, whole, 2)
    own = own.__class__(**{**vars(own), "calls": (own.calls[0]._replace(**change), *own.calls[1:])})
    with pytest.raises(Refused, match=reason):
        over_ranks._check_part(whole, own, 2)
