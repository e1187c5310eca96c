"""What two ranks do in test_sharded_trainers.py. Each has prompts of its own, and more or fewer of them than the other.

A model that hf_paged was enabled on goes through the same as its twin, which is stock's: sharded alike, trained alike.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from derived_models import CLASSES, derived_model
from family_models import family_model
from support import LOGITS, computes_in, left_padded, random_prompts, run_out, same_but_for_near_ties, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged.errors import FallbackWarning
from hf_paged.parallel import rendezvous
from hf_paged.parallel.group import ParallelGroup

TIMEOUT = 30.0  # longer than anything here takes where nobody is missed
CHECKS: dict[str, Callable[[int], Any]] = {}


def run_all(group: ParallelGroup, names: list[str]) -> dict[str, Any]:
    """What each check found on this rank. One that raises ends it: the other rank may be inside of a collective."""
    found = {}
    for name in names:
        dist.barrier()
        found[name] = CHECKS[name](group.rank)
    return found


def check(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CHECKS[function.__name__] = function
    return function


def shard(model: Any, dtype: torch.dtype | None = None, *, mesh: Any = None, root: bool = True,
          offload: OffloadPolicy | None = None, **options: Any) -> Any:
    """Each layer, and all else together, as most trainers do it."""
    options |= {"mesh": init_device_mesh("cpu", (2,)) if mesh is None else mesh,
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype),
                "offload_policy": offload or OffloadPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options) if root else model


def enabled(model: Any, **config: Any) -> Any:
    return hf_paged.enable(model, **{"strict": True, "gather_timeout": TIMEOUT, "num_blocks": 64} | config)


def prompts_of(rank: int) -> dict[str, torch.Tensor]:
    return left_padded(random_prompts([[5, 17, 9], [12]][rank], seed=rank + 1))


def generated(model: Any, rank: int, **options: Any) -> torch.Tensor:
    """The ranks end after different numbers of steps."""
    return model.generate(**prompts_of(rank) | {"max_new_tokens": 6 + 3 * rank, "do_sample": False} | options)


def same(model: Any, twin: Any, rank: int, **options: Any) -> bool:
    """The engine's tokens and stock's; of beams, which no single logit decides, every one."""
    if "num_beams" in options:
        return torch.equal(generated(model, rank, **options), generated(twin, rank, **options))
    return same_but_for_near_ties(generated(model, rank, **options), generated(twin, rank, **options, **LOGITS),
                                  precision_of(twin))


def precision_of(model: Any) -> torch.dtype:
    """What a twin's forward computes in."""
    policy = model._get_fsdp_state()._mp_policy if isinstance(model, FSDPModule) else None
    return getattr(policy, "param_dtype", None) or computes_in(model)


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> float:
    model.train()
    inputs = prompts_of(rank)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return float(loss.detach())


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def local_state(model: Any, optimizer: torch.optim.Optimizer | None = None) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of everything that a checkpoint holds."""
    state = list(model.state_dict().items())
    for moments in () if optimizer is None else optimizer.state.values():
        state += moments.items()
    return [(name, tensor.to_local() if hasattr(tensor, "to_local") else tensor) for name, tensor in state]


def equal_states(one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) > 0 and all(a == b and torch.equal(x, y)
                                              for (a, x), (b, y) in zip(one, other, strict=True))


class Counted:
    """How many collectives gathered in the block."""

    def __enter__(self) -> Counted:
        self.number, self._original = 0, rendezvous._all_gather

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return self._original(*args, **kwargs)

        rendezvous._all_gather = counted
        return self

    def __exit__(self, *exc_info: object) -> None:
        rendezvous._all_gather = self._original


def raised(call: Callable[[], Any]) -> tuple[str, str, float]:
    """(class, message, seconds) of the error that a call ends with."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


# -- what stock generates, as trained ------------------------------------------------------------------------------


def _train_and_generate(make: Callable[[], Any], rank: int) -> dict[str, bool]:
    model, twin = make(), make()
    optimizers = optimizer_of(model), optimizer_of(twin)
    enabled(model)
    same_tokens, same_losses = [], []
    for _ in range(3):
        same_tokens.append(same(model, twin, rank))
        same_losses.append(train(model, optimizers[0], rank) == train(twin, optimizers[1], rank))
    state = equal_states(local_state(model, optimizers[0]), local_state(twin, optimizers[1]))
    calls = hf_paged.get_engine(model).stats().calls
    native = calls["native"].num_calls
    hf_paged.disable(model)
    return {"tokens": all(same_tokens), "losses": all(same_losses), "state": state, "native": native == 3,
            "class": type(model) is type(twin), "attributes": vars(model).keys() == vars(twin).keys()}


@check
def full_precision(rank: int) -> Any:
    return _train_and_generate(lambda: shard(tiny_model()), rank)


@check
def mixed_precision(rank: int) -> Any:
    return _train_and_generate(lambda: shard(tiny_model(), torch.bfloat16), rank)


@check
def tied_embeddings(rank: int) -> Any:
    return _train_and_generate(lambda: shard(tiny_model(tie_word_embeddings=True), torch.bfloat16), rank)


@check
def uneven_rows(rank: int) -> Any:
    """An odd vocabulary, and norms of one row less on the second rank."""
    return _train_and_generate(lambda: shard(tiny_model(vocab_size=257, head_dim=6)), rank)


@check
def layers_alone(rank: int) -> Any:
    """Embedding, norm and head are whole on every rank, and trained there; stock has to be told that ranks step on."""
    model, twin = (shard(tiny_model(), root=False) for _ in range(2))
    enabled(model)
    found = [torch.equal(generated(model, rank), generated(twin, rank, synced_gpus=True))]
    with torch.no_grad():
        for one in (model, twin):
            one.model.embed_tokens.weight.mul_(1.5)
            one.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    found.append(torch.equal(generated(model, rank), generated(twin, rank, synced_gpus=True)))
    hf_paged.disable(model)
    return all(found)


@check
def units_as_accelerate_makes_them(rank: int) -> Any:
    """The embedding a unit of its own, final norm and head one together."""

    def make() -> Any:
        model = tiny_model()
        options = {"mesh": init_device_mesh("cpu", (2,)),
                   "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)}
        for unit in (*model.model.layers, model.model.embed_tokens, [model.model.norm, model.lm_head], model):
            fully_shard(unit, **options)
        return model

    return _train_and_generate(make, rank)


@check
def generic_family(rank: int) -> Any:
    return _train_and_generate(lambda: shard(family_model("gemma2"), torch.bfloat16), rank)


@check
def derived_classes(rank: int) -> Any:
    return [_train_and_generate(lambda name=name, of=dtype: shard(derived_model(name, CLASSES[name][0]), of), rank)
            for name, dtype in (("Cohere", torch.bfloat16), ("Olmoe", None))]


@check
def hybrid_meshes(rank: int) -> Any:
    """One group that shards, in two replicas of one rank; and the other way round."""
    found = []
    for sizes in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        found.append(_train_and_generate(lambda mesh=mesh: shard(tiny_model(), torch.bfloat16, mesh=mesh), rank))
    return found


@check
def offloaded(rank: int) -> Any:
    policy = CPUOffloadPolicy(pin_memory=False)
    return _train_and_generate(lambda: shard(tiny_model(), torch.bfloat16, offload=policy), rank)


@check
def enabled_first(rank: int) -> Any:
    """`fully_shard` derives its class from the enabled one, and replaces the parameters of a model that ran already."""
    model, twin = tiny_model(), shard(tiny_model(), torch.bfloat16)
    enabled(model)
    whole = generated(model, rank)
    shard(model, torch.bfloat16)
    optimizers = optimizer_of(model), optimizer_of(twin)
    found = [same(model, twin, rank)]
    train(model, optimizers[0], rank), train(twin, optimizers[1], rank)
    found.append(same(model, twin, rank))
    return all(found) and len(whole) == len(prompts_of(rank)["input_ids"])


@check
def under_autocast(rank: int) -> Any:
    """fp32 shards without a policy; the copies that autocast asks for are made of the gathered weights."""
    model, twin = shard(tiny_model()), shard(tiny_model())
    enabled(model)
    with torch.autocast("cpu", torch.bfloat16):
        return same(model, twin, rank)


@check
def whole_for_a_while(rank: int) -> Any:
    """After a forward in eval mode FSDP2 leaves whole parameters in the modules: of the root, or of all."""
    found = []
    for options in ({}, {"reshard_after_forward": False}):
        model, twin = (shard(tiny_model(), torch.bfloat16, **options) for _ in range(2))
        enabled(model)
        for turn in range(2):
            with torch.no_grad():
                logits = [one(**prompts_of(rank)).logits for one in (model, twin)]
            found.append(torch.equal(*logits) and same(model, twin, rank))
            if turn == 0:
                for one in (model, twin):
                    one.reshard() if not options else [unit.reshard() for unit in (one, *one.model.layers)]
                    with torch.no_grad():
                        one.model.embed_tokens.weight.mul_(1.25)
        hf_paged.disable(model)
    return all(found)


@check
def adapters(rank: int) -> Any:
    """LoRA inside of FSDP2, whose root is around the model that generates: the whole model of before is the oracle."""
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        return model.eval()

    whole, model = make(), make()
    options = {"mesh": init_device_mesh("cpu", (2,))}
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    enabled(model)
    found = [torch.equal(generated(model, rank), generated(whole, rank))]
    for one in (model, whole):
        one.base_model.disable_adapter_layers()
    found.append(torch.equal(generated(model, rank), generated(whole, rank)))
    for one in (model, whole):
        one.base_model.enable_adapter_layers()
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(2)
    found.append(torch.equal(generated(model, rank), generated(whole, rank)))
    forward = [one(**prompts_of(rank)).logits.detach() for one in (model, whole)]  # as usual afterwards
    return all(found) and torch.allclose(*forward, atol=1e-5)


# -- ranks together, and alone ---------------------------------------------------------------------------------------


@check
def gathers_after_changes(rank: int) -> Any:
    """Once a change, also where it is another rank's; and how much memory is held when."""
    model = shard(tiny_model(), torch.bfloat16)
    enabled(model)
    engine, counts, held = hf_paged.get_engine(model), [], []

    def generate() -> None:
        with Counted() as counted:
            generated(model, rank)
        counts.append(counted.number)
        held.append(engine.stats().shadow_bytes)

    generate()
    generate()
    if rank == 1:
        with torch.no_grad():  # leaves no trace in a version
            model.model.layers[0].mlp.up_proj.weight.to_local().data.mul_(0.5)
    generate()
    generate()
    engine.release_memory()
    held.append(engine.stats().shadow_bytes)
    generate()
    whole = sum(parameter.numel() for parameter in tiny_model().parameters()) * 2
    hf_paged.disable(model)
    return counts, [number / whole for number in held]


@check
def alone(rank: int) -> Any:
    """Rank 0 generates once more than rank 1; after its error both go on."""
    model, twin = shard(tiny_model()), shard(tiny_model())
    enabled(model, gather_timeout=0.5)
    first = same(model, twin, rank)
    error = raised(lambda: generated(model, rank)) if rank == 0 else None
    dist.barrier()
    enabled(model)
    again = same(model, twin, rank)
    hf_paged.disable(model)
    return first, again, error


@check
def in_stock_together(rank: int) -> Any:
    """What only stock carries out on rank 0 takes rank 1 there, too; and then both run natively again."""
    model, twin = shard(tiny_model()), shard(tiny_model())
    enabled(model, strict=False)
    options = {"output_attentions": True, "return_dict_in_generate": True} if rank == 0 else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, stock = generated(model, rank, **options), generated(twin, rank, **options)
    texts = [str(one.message) for one in caught if issubclass(one.category, FallbackWarning)]
    equal = torch.equal(ours.sequences, stock.sequences) if rank == 0 else torch.equal(ours, stock)
    later = same(model, twin, rank)
    calls = hf_paged.get_engine(model).stats().calls
    hf_paged.disable(model)
    return equal, later, calls["stock"].num_calls, calls["native"].num_calls, texts


@check
def strict_on_one(rank: int) -> Any:
    """The other rank learns at once that a call will not come, whichever of them is strict."""
    found = []
    for strict in (0, 1):
        model = enabled(shard(tiny_model()), strict=rank == strict)
        options = {"output_attentions": True, "return_dict_in_generate": True} if rank == 0 else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            found.append(raised(lambda model=model, options=options: generated(model, rank, **options)))
        hf_paged.disable(model)
    return found


@check
def no_memory_on_one(rank: int) -> Any:
    """What a rank raises while it makes room for the weights reaches the other, which waits for it."""
    model = enabled(shard(tiny_model()))
    from hf_paged.parallel import replica

    original = replica.Gatherer

    def full(parts: Any) -> Any:
        raise torch.OutOfMemoryError("no room for the weights")

    replica.Gatherer = full if rank == 1 else original
    found = raised(lambda: generated(model, rank))
    replica.Gatherer = original
    twin = shard(tiny_model())
    later = same(model, twin, rank)
    hf_paged.disable(model)
    return found, later


@check
def errors_of_arguments(rank: int) -> Any:
    """What rank 0 raises before a call begins, by stock's checks or ours, reaches rank 1, which waits for it; and what
    both raise keeps neither from going on."""
    model, whole = shard(tiny_model()), tiny_model()
    enabled(model)
    expected, found = generated(whole, rank), []
    ids = [row[row > 0].tolist() for row in prompts_of(rank)["input_ids"]]
    of_stock = {"num_return_sequences": 2, "prompt_lookup_num_tokens": 3}
    for options in (of_stock, {"structured": {"regex": 3}}, {"input_ids": "no tokens"}):
        found.append(raised(lambda options=options: generated(model, rank, **(options if rank == 0 else {}))))
        found.append(torch.equal(generated(model, rank), expected))
    found.append(raised(lambda: model.generate_batch(ids, **({"no_such_option": 1} if rank == 0 else {}))))
    found.append(raised(lambda: generated(model, rank, **of_stock)))
    found.append(torch.equal(generated(model, rank), expected))
    hf_paged.disable(model)
    return found


@check
def prompt_lookup_in_lockstep(rank: int) -> Any:
    """Three rows, which stock refuses, make the tokens of a call without; one row those of stock."""
    model, whole = shard(tiny_model()), tiny_model()
    enabled(model)
    lookup, found = {"prompt_lookup_num_tokens": 3}, []
    for options in ({"guidance_scale": 1.5}, {"encoder_repetition_penalty": 1.3}):
        expected = generated(whole, rank, **options, **(lookup if rank == 1 else {}))
        found.append(torch.equal(generated(model, rank, **options, **lookup), expected))
    hf_paged.disable(model)
    return found


class Favourite(LogitsProcessor):
    """A processor of the user's: his code picks among logits, so stock's loop runs over pages."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.where(torch.arange(scores.shape[1]) % 3 == 0, 2.0, 0.0)


@check
def stocks_loop_over_pages(rank: int) -> Any:
    """Beams, processors, scores and caches: without a collective, though stock would step on together."""
    model, twin = shard(tiny_model()), shard(tiny_model())
    enabled(model)
    found = [same(model, twin, rank, num_beams=3),
             same(model, twin, rank, logits_processor=LogitsProcessorList([Favourite()]))]
    options = {"return_dict_in_generate": True, "output_scores": True}
    ours, stock = generated(model, rank, **options), generated(twin, rank, **options)
    found.append(torch.equal(ours.sequences, stock.sequences))
    found += [torch.allclose(a, b, atol=1e-4) for a, b in zip(ours.scores, stock.scores, strict=True)]
    pairs = zip(ours.past_key_values.layers, stock.past_key_values.layers, strict=True)
    found += [torch.allclose(a.keys, b.keys[:, :, : a.keys.shape[2]], atol=1e-4) for a, b in pairs]
    calls = hf_paged.get_engine(model).stats().calls
    hf_paged.disable(model)
    return all(found), calls["lockstep"].num_calls


@check
def by_themselves(rank: int) -> Any:
    """Inside of `gathered` ranks call as often as they like, and what they like, but nothing that stock would run."""
    model = shard(tiny_model(), torch.bfloat16)
    whole = tiny_model().to(torch.bfloat16)
    enabled(model, strict=False)
    engine, found, errors = hf_paged.get_engine(model), [], []
    expected = generated(whole, rank, **LOGITS)
    outside = raised(lambda: engine.add_request([1, 2, 3]))
    with Counted() as counted, hf_paged.gathered(model) as inside:
        found.append(inside is model)
        for _ in range(1 + 2 * rank):
            found.append(same_but_for_near_ties(generated(model, rank), expected))
        if rank == 0:
            engine.add_request(prompts_of(rank)["input_ids"][1].tolist())
            run_out(engine)
            errors.append(raised(lambda: generated(model, rank, output_attentions=True,
                                                   return_dict_in_generate=True)))
        sent = counted.number
        with torch.no_grad():
            model.model.embed_tokens.weight.to_local().mul_(2)
        errors.append(raised(lambda: generated(model, rank)))
    with torch.no_grad():
        model.model.embed_tokens.weight.to_local().mul_(0.5)
    found.append(same_but_for_near_ties(generated(model, rank), expected))
    hf_paged.disable(model)
    return all(found), sent, outside, errors


@check
def other_entrances(rank: int) -> Any:
    """`generate_batch` and `install`; `explain` asks without meeting anybody."""
    model, whole = shard(tiny_model()), tiny_model()
    path = hf_paged.explain(model, max_new_tokens=3).path if rank == 0 else "native"
    expected = generated(whole, rank)
    hf_paged.install(strict=True, gather_timeout=TIMEOUT, num_blocks=64)
    try:
        found = [path == "native", torch.equal(generated(model, rank), expected)]
        ids = [row[row > 0].tolist() for row in prompts_of(rank)["input_ids"]]
        outputs = model.generate_batch(ids, max_new_tokens=6 + 3 * rank, do_sample=False)
        made = [output.generated_tokens for output in outputs.values()]
        found.append(made == expected[:, prompts_of(rank)["input_ids"].shape[1] :].tolist())
    finally:
        hf_paged.uninstall()
    return found


@check
def wrapped_in_ddp(rank: int) -> Any:
    """Each rank has the whole model: it generates by itself, as often as it likes."""
    found = []
    models = [torch.nn.parallel.DistributedDataParallel(tiny_model()) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    enabled(models[0])
    for _ in range(2):
        for _ in range(1 + rank):
            found.append(same(models[0].module, models[1].module, rank))
        losses = [train(model, optimizer, rank) for model, optimizer in zip(models, optimizers, strict=True)]
        found.append(losses[0] == losses[1])
    states = [local_state(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    found.append(equal_states(*states))
    hf_paged.disable(models[0])
    return all(found)


@check
def refused(rank: int) -> Any:
    """Why models that are sharded in other ways go to stock, which asks no other rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    split = tiny_model()
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in split.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(split, mesh=mesh["dp"])
    beside = tiny_model()
    parallelize_module(beside.model.layers[0], mesh["tp"], plan)
    fully_shard(beside.model.layers[1], mesh=init_device_mesh("cpu", (2,)))
    wide = tiny_model()
    for layer in wide.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    fully_shard(wide, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    parts = tiny_model()
    for layer in parts.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(parts)
    hooked = shard(tiny_model())
    hooked.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    found = {}
    for name, model in {"split": split, "beside": beside, "wide": wide, "parts": parts, "hooked": hooked}.items():
        [reason] = hf_paged.explain(model, max_new_tokens=3).reasons[:1]
        found[name] = reason
    return found


# -- what trainers make of it ------------------------------------------------------------------------------------------


@check
def accelerates_plugin(rank: int) -> Any:
    """As TRL and Trainer have it: fp32 parameters, computed in bf16, checkpointed activations; enabled before, once."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # without which accelerate does not shard
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False, activation_checkpointing=True,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    found, results = [accelerator.is_fsdp2], []
    for ours in (True, False):
        model = tiny_model(tie_word_embeddings=True).to(torch.bfloat16)
        if ours:
            enabled(model)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        made, losses = [], []
        for _ in range(3):
            made.append(generated(accelerator.unwrap_model(model), rank, **({} if ours else LOGITS)))
            model.train()
            loss = model(**prompts_of(rank), labels=prompts_of(rank)["input_ids"], use_cache=False).loss
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            model.eval()
        found.append({parameter.dtype for parameter in model.parameters()} == {torch.float32})
        results.append((made, losses, local_state(model, optimizer.optimizer), model))
    (made, losses, state, model), (made_by_stock, losses_of_stock, state_of_stock, _) = results
    found.append(all(map(same_but_for_near_ties, made, made_by_stock)) and not torch.equal(made[0], made[-1]))
    found.append(losses == losses_of_stock)
    found.append(equal_states(state, state_of_stock))
    found.append(hf_paged.get_engine(model).stats().calls["native"].num_calls)
    return found
