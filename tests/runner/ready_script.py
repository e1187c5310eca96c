"""What requests need after an engine is ready, on a GPU that nobody has; run by `test_ready.py`, which looks at it.

    python ready_script.py CASE     prints a line of JSON
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import peft
import service
import torch
import torch.distributed as dist
from family_models import family_model
from outlines import outlined as derived_outlined
from pretended_gpu import launched, variants
from recurrent_models import PUBLISHED_HEADS, outlined, recurrent_model
from service import SAMPLED, Service, nobodys_gpu, one_of_two, qwen3, qwen3_moe

from hf_paged.config import PagedConfig
from hf_paged.kernels.build import compiling
from hf_paged.models import lora
from hf_paged.runner.warm_up import WarmUp
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.log_probs import PROCESSED, RAW
from hf_paged.sampling.table import GREEDY, Drawing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import workloads

EDITS = {
    "repetition": {"repetition_penalty": 1.1}, "counts": {"presence_penalty": 0.5, "frequency_penalty": 0.1},
    "n-grams": {"no_repeat_ngram_size": 3}, "bad words": {"bad_words_ids": ((5, 6), (7,))},
    "300 biases": {"sequence_bias": tuple(((i,), 0.5) for i in range(300))},
    "suppress": {"suppress_tokens": tuple(range(200))}, "begin": {"begin_suppress_tokens": (3, 4)},
    "forced": {"forced_eos_token_ids": (2,)}, "decay": {"decay_start": 5, "decay_factor": 1.1},
    "typical": {"typical_p": 0.9},
}

FILTERED = Drawing(do_sample=True, temperature=0.6, top_p=0.9, top_k=50)
REPETITION = Edits(**EDITS["repetition"])


def plain(backend: str) -> dict[str, Any]:
    service = Service(qwen3(2), backend=backend)
    found = {"ready": service.get_ready()}
    prefix = workloads.with_prefix(2048, 64, 64)
    served = {
        "single": workloads.single(), "nano": workloads.nano(), "nano again": workloads.nano(),
        "long prompts": workloads.long_prompts(64, 2000, 7000), "no prefix": workloads.with_prefix(0, 2112, 64),
        "four of 30k": workloads.long_prompts(4, 30_000, 30_000), "nano behind 30k": workloads.nano(),
    }
    for name, load in served.items():
        found[name] = service.serve(name, load.prompts, load.output_lengths, SAMPLED if load.temperature else GREEDY)
    scheduler = service.scheduler()
    service.serve("prefix", [prefix.prompts[0][:2048]], [1], scheduler=scheduler)
    found["warm prefix"] = service.serve("warm prefix", prefix.prompts, prefix.output_lengths, scheduler=scheduler)
    found["filters"] = service.serve("filters", prefix.prompts[:32], [16] * 32,
                                     FILTERED)
    found["stop tokens"] = service.serve("stop tokens", prefix.prompts[:8], [16] * 8, eos_token_ids=(1, 2, 3))
    found["nano at last"] = service.serve("nano at last", served["nano"].prompts, served["nano"].output_lengths)
    return found


def options(is_optional: str = "") -> dict[str, Any]:
    """Requests with one option each. ``is_optional``: optional features are looked at, too; see `dry_runs`."""
    service, load = Service(qwen3(2), num_blocks=6000), workloads.uniform(8, 200, 16)
    found: dict[str, Any] = {"ready": service.get_ready(optional=bool(is_optional))}

    def serve(name: str, **options: Any) -> None:
        found[name] = service.serve(name, load.prompts, load.output_lengths, **options)

    serve("plain")
    for kind in (RAW, PROCESSED):
        serve(kind, scored=(kind,))
    serve("masks", masked=True)
    serve("masks and raw", masked=True, scored=(RAW,))
    serve("least length", min_length=210, eos_token_ids=(1,))
    for name, edits in EDITS.items():
        serve(name, edits=Edits(**edits))
        if name == "repetition":
            serve("repetition and processed", edits=Edits(**edits), scored=(PROCESSED,))
            serve("repetition and masks", edits=Edits(**edits), masked=True)
    serve("plain again")
    return found


def guesses() -> dict[str, Any]:
    """Few requests that guess many tokens: more rows than requests."""
    service = Service(qwen3(2), num_blocks=6000, most_rows=8)
    found: dict[str, Any] = {"ready": service.get_ready(optional=True)}
    for number in (1, 8):
        load = workloads.uniform(number, 200, 64)
        name = f"{number} guess"
        found[name] = service.serve(name, load.prompts, load.output_lengths, num_guesses=15)
    return found


def rows_beside_prompts(most_rows: str, is_adapted: str = "") -> dict[str, Any]:
    """Steps of a large model, which run eagerly: prompts, and beside them every number of decode rows."""
    model: Any = qwen3(2)
    if is_adapted:
        lora.is_patched = lambda: False  # which `nobodys_gpu` has patched
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, init_lora_weights=False, target_modules="all-linear"))
    count = int(most_rows)
    service = Service(model.eval(), num_parameters=8_000_000_000, most_rows=count)
    found: dict[str, Any] = {"ready": service.get_ready()}
    scheduler, seen = service.scheduler(max_num_batched_tokens=1400, enable_prefix_caching=False), set[int]()
    own = scheduler.schedule

    def schedule(*args: Any) -> Any:
        plan = own(*args)
        if plan is not None and len(plan.slots) > plan.num_decode_rows:
            seen.add(plan.num_decode_rows)
        return plan

    scheduler.schedule = schedule
    prompts = [[7 + i % 3] * 1300 for i in range(count)]
    found["rows"] = service.serve("rows", prompts, [count + 60] * count, scheduler=scheduler)
    return found | {"numbers": len(seen)}


def moe() -> dict[str, Any]:
    return derived(qwen3_moe())


def derived(model: Any) -> dict[str, Any]:
    """One workload four times, and prompts of any length."""
    service, load = Service(model, num_blocks=6000), workloads.uniform(64, 200, 16)
    found: dict[str, Any] = {"ready": service.get_ready()}
    names = ("first", "second", "third", "fourth")
    found |= {name: service.serve(name, load.prompts, load.output_lengths) for name in names}
    lengths = [300 * 1.2 ** i for i in range(19)]  # of prompts, up to the largest step
    alone = [service.serve(f"alone-{i}", [[7] * int(length)], [2]) for i, length in enumerate(lengths)]
    return found | {"prompts of any length": [one["variants"] for one in alone if one["variants"]]}


def adapters(dtype: str, num_layers: str, is_all: str = "") -> dict[str, Any]:
    """Two adapters of all linear layers; requests with the active one, and requests that name one.

    ``is_all``: nothing but what is done before the first request.
    """
    lora.is_patched = lambda: False  # which `nobodys_gpu` has patched
    config = peft.LoraConfig(r=16, init_lora_weights=False, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(qwen3(int(num_layers)), config, autocast_adapter_dtype=False)
    model.add_adapter("other", config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    service, load = Service(model.eval(), num_blocks=6000), workloads.uniform(64, 200, 16)
    found: dict[str, Any] = {"ready": service.get_ready()}
    if is_all:
        return found
    found["active"] = service.serve("active", load.prompts, load.output_lengths)
    found["named"] = service.serve("named", load.prompts, load.output_lengths, adapter="other")
    return found


def autocast() -> dict[str, Any]:
    """Weights in float32, as a trainer has them, and calls under bfloat16."""
    service, load = Service(qwen3(2).float(), num_blocks=6000, autocast=torch.bfloat16), workloads.uniform(64, 200, 16)
    found: dict[str, Any] = {"ready": service.get_ready()}
    return found | {name: service.serve(name, load.prompts, load.output_lengths) for name in ("first", "second")}


def with_states(name: str) -> Any:
    many = {"num_experts": 64, "num_experts_per_tok": 8} if name == "Qwen3Next" else {}  # prompts' lengths choose tiles
    model = recurrent_model(name, **PUBLISHED_HEADS[name], **many, max_position_embeddings=service.MOST_LENGTH)
    return outlined(model.to(torch.bfloat16))


def states(model: Any) -> dict[str, Any]:
    """Every workload of `workloads.py`, a part of it, by a model with recurrent states; prompts of any length."""
    service.MOST_TOKENS = 1024
    found: dict[str, Any] = {}
    with compiling._Zeros():  # modules read slots, which kernels that are not launched do not write
        served = Service(model, num_blocks=6000, most_rows=32)
        found["ready"] = served.get_ready()
        for name in ("batch 32", *workloads.WORKLOADS):
            load = workloads.make_workload(name, 0.05)
            prompts = [prompt for prompt in load.prompts[:24] for _ in range(load.samples)]
            scheduler = served.scheduler()
            if load.warm:
                served.serve("prefix", [load.prompts[0][: load.shared]], [1], scheduler=scheduler)
            found[name] = served.serve(name, prompts, [20] * len(prompts), SAMPLED if load.temperature else GREEDY,
                                       scheduler=scheduler)
        lengths = [round(1.3 ** i) for i in range(28)]
        alone = [served.serve(f"alone-{length}", [[7] * length], [2]) for length in lengths]
    return found | {"prompts of any length": [one["variants"] for one in alone if one["variants"]]}


def manifest() -> dict[str, Any]:
    """Requests with rare options, in a process that begins with what the one before it needed."""
    service, load = Service(qwen3(2), num_blocks=6000), workloads.uniform(8, 200, 16)
    service.runner.graphs = service.graphs
    warm_up = WarmUp(service.runner.executor, PagedConfig(warmup="full"))
    warm_up.begin()
    service.get_ready()
    warm_up.get_ready(service.runner)
    known = sorted((shape.name, number) for shape, number in warm_up.manifest.shapes.items())
    found = {"known": known, "is done": warm_up.is_done}
    for name in ("n-grams", "forced", "decay"):
        found[name] = service.serve(name, load.prompts, load.output_lengths, edits=Edits(**EDITS[name]))
    warm_up.saver.close()
    return found


def ranks() -> dict[str, Any]:
    """Two ranks one after the other: the first misses every kernel, and the second finds them.

    ``collectives``: those of torch and the kernels of hf_paged, by name: in dry runs, and for requests.
    """
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "all_to_all_single"):
        own = getattr(dist, name)
        setattr(dist, name, lambda *args, name=name, own=own, **named: calls.append(name) or own(*args, **named))
    found: dict[str, Any] = {}
    for rank in (0, 1):
        service, load = Service(qwen3(2, one_of_two(rank)), num_blocks=6000), workloads.uniform(64, 200, 16)
        del calls[:], launched[:]
        one: dict[str, Any] = {"ready": service.get_ready_dry(), "dry": [*calls, *launched]}
        for name, options in {"plain": {}, "filters": {"drawing": FILTERED}, "repetition": {"edits": REPETITION},
                              "raw": {"scored": (RAW,)}, "masks": {"masked": True}}.items():
            one[name] = service.serve(name, load.prompts, load.output_lengths, **options)
        one["collectives"] = [*calls, *(name for name in launched if name in
                                        ("_all_reduce_kernel", "_all_reduce_add_rms_norm_kernel"))]
        found[f"rank {rank}"] = one
    return found


def waits() -> dict[str, Any]:
    """Kernels that are compiled one after the other for a request that waits; requests that come then."""
    service, load = Service(qwen3(2), num_blocks=6000), workloads.uniform(8, 200, 16)
    service.runner.graphs = service.graphs
    service.get_ready()
    compiling.compile_elsewhere = lambda compile: None  # the thread behind it notes the variant
    found: dict[str, Any] = {}
    for name, stages, scored in (("repetition", {"repetition_penalty"}, ()), ("counts", {"counts"}, ()),
                                 (RAW, set(), (RAW,))):
        before, missing = len(variants), 0
        while kernels := service.runner.missing_kernels(frozenset(stages), scored, masked=False, named=False):
            missing += len([kernel.result(60) for kernel in kernels])
        found[f"{name}: missing"] = [missing, len(variants) - before]
        edits = {"edits": Edits(**EDITS[name])} if stages else {}
        found[name] = service.serve(name, load.prompts, load.output_lengths, scored=scored, **edits)
    return found


def alike() -> list[str]:
    """Kernels with variants that differ in nothing but alignments and integers that were 1."""
    found = defaultdict(set)
    for variant in variants:
        found[variant.key(hints=False)].add(variant.key())
    return sorted(key[0] for key, keys in found.items() if len(keys) > 1)


if __name__ == "__main__":
    cases = {case.__name__: case for case in (
        plain, options, adapters, states, autocast, guesses, moe, derived, ranks, manifest, rows_beside_prompts, waits)}
    name, *given = sys.argv[1:]
    if name == "states":
        given = [with_states(*given)]  # found on the CPU, as everywhere
    elif name == "derived":
        given = [derived_outlined(family_model(*given, head_dim=64, max_position_embeddings=service.MOST_LENGTH).to(
            torch.bfloat16))]
    with nobodys_gpu():
        made = cases[name](*given)
    print(json.dumps({"served": made, "alike": alike(), "all": dict(Counter(variant.name for variant in variants))}))
