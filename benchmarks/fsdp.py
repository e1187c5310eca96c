"""Time a model sharded by FSDP2: gathering its weights, and tokens per second against the model on one GPU.

    python benchmarks/fsdp.py --model 8B --size 2 [--rows 128] [--prompt 256] [--new 256] [--runs 2] [--limit 110]
    python benchmarks/fsdp.py --model tiny --size 2 --rows 3 --prompt 9 --new 8       # on a CPU, over gloo

The fp32 parameters are random and lie spread over the ranks, as a trainer keeps them; the policy computes in bf16. Each
rank generates its own prompts by `model.generate`, greedily. "gather" is a whole call of `hf_paged.gathered` after a
write to the weights: the checksum of the rank's parts, the meeting, the collectives. "alone" is the same model in bf16
on each rank, enabled without sharding, after the sharded one was deleted. Ranks write figures and logs to $OUT, if set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rank_processes import wait_or_kill

# Before CUDA is initialised, in every process: multicast of NVLink switches can take a shared host down.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def sharded_model(config: Any, device: Any, size: int) -> Any:
    """Random fp32 parameters, of which each rank makes its own."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).float().eval()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (size,)), "mp_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return _filled(model, device)


def whole_model(config: Any, device: Any) -> Any:
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16().eval()
    return _filled(model, device)


def _filled(model: Any, device: Any) -> Any:
    """With random weights on a device, and the frequencies of RoPE, which no checkpoint holds."""
    import torch

    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model.model.rotary_emb.inv_freq = rotary.inv_freq
    model.model.rotary_emb.original_inv_freq = rotary.inv_freq
    return model


def rate(model: Any, args: argparse.Namespace, device: Any, rank: int) -> list[float]:
    """Tokens per second of each run on this rank, the first of which warms up and is left out."""
    import torch

    rates = []
    for run in range(args.runs + 1):
        generator = torch.Generator().manual_seed(1000 * rank + run)
        ids = torch.randint(1, model.config.vocab_size, (args.rows, args.prompt), generator=generator).to(device)
        torch.distributed.barrier()
        start = time.perf_counter()
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new,
                              do_sample=False, eos_token_id=None, pad_token_id=0)
        made = made.cpu()  # waits for the device
        rates.append(made[:, args.prompt :].numel() / (time.perf_counter() - start))
    return rates[1:]


def gathers(model: Any, args: argparse.Namespace) -> list[float]:
    """Seconds of each gathering after a change; the first also allocates."""
    import torch

    import hf_paged

    seconds = []
    for _ in range(args.runs + 2):
        with torch.no_grad():
            model.model.norm.weight.to_local().mul_(1.0009765625)
        _wait(model)
        torch.distributed.barrier()
        start = time.perf_counter()
        with hf_paged.gathered(model):
            _wait(model)
            seconds.append(time.perf_counter() - start)
    return seconds


def _wait(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def run_rank(args: argparse.Namespace) -> None:
    """One rank, whose place is in its environment; its figures go to a file."""
    import torch
    import torch.distributed as dist
    from workloads import qwen3_config

    import hf_paged

    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    config = qwen3_config(args.model)
    figures: dict[str, Any] = {"rank": rank, "seconds": {}}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        figures["seconds"][name] = time.perf_counter() - start
        print(f"rank {rank}: {name} {figures['seconds'][name]:.2f} s", flush=True)
        return result

    model = timed("make", lambda: sharded_model(config, device, args.size))
    hf_paged.enable(model, strict=True, gather_timeout=60.0, max_num_seqs=max(args.rows, 1))
    figures["gather"] = timed("gather", partial(gathers, model, args))
    figures["sharded"] = timed("generate sharded", partial(rate, model, args, device, rank))
    stats = hf_paged.get_engine(model).stats()
    figures["shadow_bytes"], figures["native"] = stats.shadow_bytes, stats.calls["native"].num_calls
    if on_gpu:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    hf_paged.disable(model)
    del model
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    alone = timed("make alone", lambda: whole_model(config, device))
    hf_paged.enable(alone, strict=True, max_num_seqs=max(args.rows, 1))
    figures["alone"] = timed("generate alone", lambda: rate(alone, args, device, rank))
    Path(args.folder, f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> int:
    """Start the ranks, each in a process group of its own, end them in time, and print what they found."""
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
    ranks = []
    for rank in range(args.size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.size), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), **ENVIRONMENT}
        with Path(folder, f"rank{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT,
                                          start_new_session=True))
    deadline = time.monotonic() + args.limit
    if wait_or_kill(ranks, deadline):
        for number in range(args.size):
            print(Path(folder, f"rank{number}.log").read_text()[-3000:])
        return 1
    figures = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(args.size)]
    report(args, figures)
    return 0


def report(args: argparse.Namespace, figures: list[dict[str, Any]]) -> None:
    """The slowest rank of each, medians over runs."""
    first = max(rank["gather"][0] for rank in figures)
    later = max(statistics.median(rank["gather"][1:]) for rank in figures)
    sharded = min(statistics.median(rank["sharded"]) for rank in figures)
    alone = min(statistics.median(rank["alone"]) for rank in figures)
    gib = figures[0]["shadow_bytes"] / 2**30
    print(f"{args.model} over {args.size}: {args.rows} rows a rank, {args.prompt} in, {args.new} out")
    print(f"{'gather, first / later (s)':34}{first:10.3f}{later:10.3f}   ({gib:.1f} GiB on each rank)")
    print(f"{'tokens/s a rank, sharded / alone':34}{sharded:10.0f}{alone:10.0f}   ({sharded / alone:.1%})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=110.0, help="seconds after which the ranks are ended")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        run_rank(arguments)
    else:
        sys.exit(launch(arguments))
