"""What the ranks of the several-process tests run; models and prompts come from the same seeds in every process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from family_models import family_model
from support import batch
from transformers import GenerationConfig

import hf_paged
from hf_paged.config import ON_WEIGHT_CHANGE
from hf_paged.engine import weight_access
from hf_paged.errors import FallbackWarning
from hf_paged.models import find_executor
from hf_paged.models.eligibility import why_not_native
from hf_paged.parallel import checkpoint
from hf_paged.parallel.adapters import add_adapter
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.loading import load
from hf_paged.runner.model_runner import ModelRunner

NEW_TOKENS = 6


def fails(group: ParallelGroup) -> None:
    raise ValueError(f"on purpose by rank {group.rank}")


def compare_with_stock(group: ParallelGroup, cases: list[tuple[str, dict[str, Any], str]]) -> list[dict[str, Any]]:
    """For every (variant, overrides, checkpoint of that model): how this rank's model compares with the whole one."""
    return [_compare(group, family_model(variant, **overrides), path) for variant, overrides, path in cases]


@torch.no_grad()
def _compare(group: ParallelGroup, whole: Any, path: str) -> dict[str, Any]:
    sharded = load(path, group, device="cpu")
    inputs = batch([5, 17, 30])
    keep = inputs["attention_mask"].bool()
    ours, stock = sharded(**inputs).logits[keep], whole(**inputs).logits[keep]

    executor = find_executor(sharded)(sharded)  # type: ignore[misc]
    hidden = sharded.model(inputs["input_ids"][:1]).last_hidden_state[0]
    all_columns, own = executor.logits(hidden), executor.shard_logits(hidden)
    head = sharded.lm_head
    mine = all_columns[:, head.first : head.first + head.num_real]

    expected = whole.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_paged.enable(sharded, num_blocks=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        tokens = sharded.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_paged.disable(sharded)
    return {
        "error": float((ours - stock).abs().max() / stock.abs().max()),
        "same_tokens": torch.equal(tokens, expected),
        "new_tokens": tokens.shape[1] - inputs["input_ids"].shape[1],
        "own_columns": torch.equal(own[:, : head.num_real], mine) and own.shape[1] == len(head.weight),
        "logits_shape": tuple(all_columns.shape),
        "vocab_size": executor.vocab_size,
        "group": (executor.group.rank, executor.group.size),
        "kv_heads": executor.kv_spec().num_kv_heads,
    }


def memory_of_loading(group: ParallelGroup, path: str, size: int) -> tuple[int, int]:
    """(bytes of the parameters, growth of this process's resident memory at its peak) of the last of `size` ranks."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    checkpoint._CHUNK_BYTES, checkpoint._BATCH_BYTES = 4 << 20, 8 << 20
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    model = load(path, ParallelGroup(size - 1, size), device="cpu")
    return sum(p.nbytes for p in model.parameters()), _resident("VmHWM") - before


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def compare_and_refuse(
    group: ParallelGroup, cases: list[tuple[str, dict[str, Any], str]]
) -> tuple[list, dict, list[tuple[Any, Any]]]:
    return compare_with_stock(group, cases), sharded_by_others(), sampled_by_stock(group, *cases[-1])


def sampled_by_stock(group: ParallelGroup, variant: str, overrides: dict[str, Any], path: str) -> list[tuple[Any, Any]]:
    """What calls that go to stock draw on this rank, and what the whole model draws with rank 0's random numbers."""
    sharded, whole = load(path, group, device="cpu"), family_model(variant, **overrides)
    hf_paged.enable(sharded, num_blocks=64)
    allowed = {"prefix_allowed_tokens_fn": lambda batch, tokens: list(range(250))}
    made = []
    for kwargs in ({"num_beams": 2}, allowed):
        both = []
        for model, seed in ((sharded, group.rank), (whole, 0)):
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                both.append(model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=NEW_TOKENS,
                                           do_sample=True, **kwargs).tolist())
        made.append((both[0], both[1]))
    hf_paged.disable(sharded)
    return made


def sharded_by_others() -> dict[str, str | None]:
    """What recognition says of models that FSDP, FSDP2 and transformers' own tensor parallelism sharded."""
    # Imported here: they take the other ranks' processes a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    reasons = {}
    for name in ("flat", "original", "FSDP2", "DTensor"):
        model = family_model("llama")
        if name == "FSDP2":
            fully_shard(model.model.layers[0], mesh=mesh)
        elif name == "DTensor":
            parallelize_module(model, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
        else:
            FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"),
                                     use_orig_params=name == "original")
        reason = why_not_native(find_executor(model)(model))  # type: ignore[misc]
        reasons[name] = None if reason is None else reason.with_remedy
    return reasons


def updated_while_it_runs(group: ParallelGroup, path: str, after: list[int]) -> list[Any]:
    """Every rank runs this: its own part of the weights changes after some steps. Tokens and versions of each mode."""
    made = []
    for mode in ON_WEIGHT_CHANGE:
        model = load(path, group, dtype=torch.float32, device=torch.device("cpu"))
        hf_paged.enable(model, num_blocks=20, on_weight_change=mode)
        engine = hf_paged.get_engine(model)
        engine.add_request(list(range(1, 30)), GenerationConfig(max_new_tokens=24))
        steps = 0
        while engine.has_unfinished():
            made += [(o.completion.token_ids, o.completion.weight_versions) for o in engine.step() if o.completion]
            steps += 1
            if steps in after:
                with hf_paged.weight_update(model):
                    model.model.layers[0].self_attn.v_proj.weight.data.neg_()
        hf_paged.disable(model)
    return made


def dry_runs_between(group: ParallelGroup, path: str) -> list[list[Any]]:
    """Tokens of some requests: without dry runs, and where rank 1 makes one before all steps, and rank 0 before few."""
    own, made = ModelRunner._compiled, []

    def compiled(runner: ModelRunner, run: Any, plan: Any) -> Any:
        if group.rank == 1:
            runner._known_kinds.clear()
        return own(runner, run, plan)

    for is_on in (False, True):
        model = load(path, group, dtype=torch.float32, device=torch.device("cpu"))
        hf_paged.enable(model, num_blocks=40)
        engine, found = hf_paged.get_engine(model), []
        with patch.object(ModelRunner, "_compiled", compiled):
            for i in range(3):
                drawing = {"do_sample": True, "top_k": 20 * (i > 1)} if i else {}
                engine.add_request(list(range(1, 9 * i + 5)), GenerationConfig(max_new_tokens=6, **drawing), seed=i,
                                   logprobs=i % 2 == 0)
            while engine.has_unfinished():
                found += [(o.completion.token_ids, o.completion.logprobs) for o in engine.step() if o.completion]
                engine._core.pool.runner._compiles = is_on
        hf_paged.disable(model)
        made.append(found)
    return made


def load_weights(group: ParallelGroup, path: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """New weights into an engine on every rank, and what this rank has of them; then a load that rank 1 cannot do."""
    model = load(path, group, device="cpu")
    hf_paged.enable(model, num_blocks=64)
    engine, inputs = hf_paged.get_engine(model), batch([5, 17, 30])
    model.generate(**inputs, max_new_tokens=2, do_sample=False)
    engine.load_weights(iter(state.items()))
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    result: dict[str, Any] = {"tokens": tokens, "found": dict(engine.named_weights())}
    try:
        engine.load_weights(state if group.rank == 0 else [*state])
    except (TypeError, ValueError, RuntimeError) as error:
        result |= {"error": type(error).__name__, "message": str(error)}
    assert model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False).tolist() == tokens
    hf_paged.disable(model)
    return result


def load_adapter(group: ParallelGroup, path: str, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Tokens under an adapter that every rank loads, and without it; then one that a rank alone cannot load."""
    model = load(f"{path}/base", group, device="cpu")
    hf_paged.enable(model, num_blocks=64)
    engine = hf_paged.get_engine(model)

    def made(name: str | None) -> list[list[int]]:
        config, found = GenerationConfig(max_new_tokens=count), {}
        asked = [engine.add_request(prompt, config, adapter_name=name) for prompt in prompts]
        while engine.has_unfinished():
            found.update((o.request_id, o.completion.token_ids) for o in engine.step() if o.completion)
        return [found[i] for i in asked]

    engine.load_adapter("red", f"{path}/red")
    result: dict[str, Any] = {"rank": group.rank, "tokens": made("red")}
    try:
        engine.load_adapter("blue", f"{path}/blue" if group.rank == 0 else 3)
    except (TypeError, ValueError) as error:
        result["error"] = type(error).__name__
    assert engine.adapter_names == ("red",) and made("red") == result["tokens"]
    engine.delete_adapter("red")
    result["base"] = made(None)
    hf_paged.disable(model)
    return result


def differing_adapters(group: ParallelGroup, path: str, prompts: list[list[int]], count: int) -> list[Any]:
    """Errors of calls that differ by rank, then tokens under "red", which was active before, and under "blue"."""
    model, errors = load(f"{path}/base", group, device="cpu"), {}
    hf_paged.enable(model, num_blocks=64)
    engine = hf_paged.get_engine(model)
    for name in ("red", "blue"):
        engine.load_adapter(name, f"{path}/{name}")
    engine.set_adapter("red")

    def add_on_one(*args: Any) -> list[str]:
        if group.rank:
            raise MemoryError("no room")
        return add_adapter(*args)

    def made() -> list[list[int]]:
        return [model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt):].tolist()
                for prompt in prompts]

    def error_of(what: str, call: Callable[[str], None], *names: Any) -> None:
        try:
            call(names[group.rank])
        except Exception as error:
            errors[what] = type(error).__name__

    error_of("other names", engine.set_adapter, "red", ["red", "blue"])
    error_of("unknown", engine.set_adapter, "blue", "green")
    error_of("deleted", engine.delete_adapter, "red", "green")
    error_of("loaded", lambda name: engine.load_adapter(name, f"{path}/red"), "one", "other")
    with patch.object(weight_access, "add_adapter", add_on_one):
        error_of("half", lambda name: engine.load_adapter(name, f"{path}/red"), "green", "green")
    assert engine.adapter_names == ("blue", "red")
    found = [errors, made()]
    engine.set_adapter("blue")
    found.append(made())
    hf_paged.disable(model)
    return found
