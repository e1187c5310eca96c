"""What two ranks do in test_deepspeed.py: ZeRO-3 on CPUs, as TRL trains with it."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from fsdp_checks import enabled, generated, prompts_of
from support import tiny_model

import hf_paged
from hf_paged.errors import FallbackWarning
from hf_paged.parallel.group import ParallelGroup


def train_and_generate(group: ParallelGroup) -> dict[str, Any]:
    """Rollouts inside of the gathered context, by hf_paged and by stock, with a training step after each."""
    os.environ.update(RANK=str(group.rank), LOCAL_RANK=str(group.rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    results: dict[str, Any] = {}
    for ours in (True, False):
        model = tiny_model()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
                  "zero_force_ds_cpu_optimizer": False,
                  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        trainer, *_ = deepspeed.initialize(model=model, config=config,
                                           optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
        if ours:
            enabled(model)
            results["outside"] = hf_paged.explain(model, max_new_tokens=3).reasons
        made, losses = [], []
        for turn in range(3):
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                if ours and turn == 0:
                    results["with_hooks"] = hf_paged.explain(model, max_new_tokens=3).reasons
                remove_hooks(trainer)
                made.append(generated(model, group.rank, synced_gpus=ours))
                if ours and turn == 1:
                    results["in_stock"] = _in_stock(model, group.rank)
                add_hooks(trainer)
            loss = trainer(**prompts_of(group.rank), labels=prompts_of(group.rank)["input_ids"]).loss
            trainer.backward(loss)
            trainer.step()
            losses.append(float(loss.detach()))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights = [parameter.detach().clone() for parameter in model.parameters()]
        results[f"ours={ours}"] = made, losses, weights
        if ours:
            engine = hf_paged.get_engine(model)
            results["native"] = engine.stats().calls["native"].num_calls
            held = engine.stats().shadow_bytes
            engine.release_memory()
            results["held"] = held > 0, engine.stats().shadow_bytes
    made, losses, weights = results.pop("ours=True")
    stock_made, stock_losses, stock_weights = results.pop("ours=False")
    results["equal"] = (all(map(torch.equal, made, stock_made)), losses == stock_losses,
                        all(map(torch.equal, weights, stock_weights)))
    return results


def _in_stock(model: Any, rank: int) -> bool:
    """What only stock carries out on rank 0 takes rank 1 there: the hook that TRL leaves compares what ranks do."""
    options = {"output_attentions": True, "return_dict_in_generate": True} if rank == 0 else {}
    hf_paged.enable(model, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        made = generated(model, rank, synced_gpus=True, **options)
    enabled(model)
    again = generated(model, rank, synced_gpus=True)
    return torch.equal(made.sequences if rank == 0 else made, again)
