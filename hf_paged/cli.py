"""Command `hf-paged`. Its parser starts fast: only a running command imports torch and transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import hf_paged
from hf_paged.config import read_pairs
from hf_paged.serve import add_arguments, count, serve

_CHECK = """`hf-paged check MODEL`: report what of a model would run natively, why not, and what fits into memory.

Nothing is generated and no weights are read: the model is built from its config with memory that is never touched, so
that the report takes seconds for a checkpoint of any size. A quantized model is loaded: only then are its layers known.
"""
_COMPILE = """`hf-paged compile MODEL --sm 90`: compile the kernels that an engine of a model and settings needs.

No GPU is needed and no weights are read, so that the build of an image can do it. The kernels lie in Triton's cache
(TRITON_CACHE_DIR). A process with the same versions of Triton, torch and hf_paged, and the same settings, finds them.
"""
# Usual calls, which `check` reports besides the given one.
_CALLS: dict[str, dict[str, Any]] = {
    "greedy search": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "with scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
_WARM_UPS = 2  # batches before those that `bench latency` counts


def main(arguments: list[str] | None = None) -> int:
    """Run a command, by default that of the process's arguments, and return the exit status."""
    parser = argparse.ArgumentParser("hf-paged", description="Serving-engine speed for Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"hf_paged {hf_paged.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_check(commands)
    _add_bench(commands)
    _add_compile(commands)
    server = commands.add_parser("serve", help="an OpenAI server of one model")
    add_arguments(server)
    server.set_defaults(run=serve)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"hf-paged: {error}", file=sys.stderr)
        return 2
    return status


# -- check ------------------------------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    parser = commands.add_parser("check", help="what of a model would run natively, why not, and what fits into memory",
                                 description=_CHECK, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with at least a config.json, or a model id")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto: as the config says")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; left out: CUDA where there is a GPU")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of PagedConfig")
    parser.add_argument("--generate", nargs="*", default=[], metavar="NAME=VALUE",
                        help="a call to look at besides the usual ones: arguments of model.generate")
    parser.add_argument("--load", action="store_true", help="read the weights, too")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    """Print the report; returns 0 if a plain `generate` would be native, else 1."""
    from hf_paged.integration.explain import preview

    calls = dict(_CALLS)
    if arguments.generate:
        calls["as asked"] = read_pairs(arguments.generate)
    report = preview(arguments.model, calls, dtype=arguments.dtype, device=arguments.device, load=arguments.load,
                     trust_remote_code=arguments.trust_remote_code, overrides=read_pairs(arguments.set))
    print(json.dumps(dataclasses.asdict(report), indent=2) if arguments.json else report)
    return int(report.calls["greedy search"].path != "native")


# -- compile ----------------------------------------------------------------------------------------------------------


def _add_compile(commands: Any) -> None:
    parser = commands.add_parser("compile", help="compile a model's kernels into Triton's cache, without a GPU",
                                 description=_COMPILE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with at least a config.json, or a model id")
    parser.add_argument("--sm", type=int, required=True,
                        help="compute capability of the GPU: 80 A100, 86 A40, 89 L40S, 90 H100, 100 B200, 120 RTX PRO")
    parser.add_argument("--sms", type=_positive, help="its number of multiprocessors; left out: that of the GPU above")
    parser.add_argument("--memory", type=_positive, help="its GiB, which bound the sequences of models with states")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto: as the config says")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the PagedConfig")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    """Compile, and print what the cache has; returns 1 if a kernel or a step failed."""
    from hf_paged.integration.compile_ahead import compile_ahead
    from hf_paged.kernels.build.absent_gpu import gpu_model

    config = hf_paged.PagedConfig(**read_pairs(arguments.set))
    began = time.perf_counter()
    memory = None if arguments.memory is None else arguments.memory << 30
    report = compile_ahead(arguments.model, config, gpu_model(arguments.sm, arguments.sms, memory),
                           dtype=arguments.dtype, trust_remote_code=arguments.trust_remote_code)
    for failure in report.failed:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"{report.num_compiled} kernels compiled, {report.num_found} found in {time.perf_counter() - began:.1f} s, "
          f"for compute capability {arguments.sm / 10}\ncache: {report.folder}; manifest: {report.manifest or 'none'}\n"
          "not covered: adapters, autocast, several GPUs, other packages (FlashAttention), rare edits of logits")
    return int(bool(report.failed))


# -- bench: a `PagedGenerator`, with random token ids and outputs of one length ---------------------------------------


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="throughput and latency of a model")
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    many = kinds.add_parser("throughput", help="many prompts at once through a PagedGenerator")
    batches = kinds.add_parser("latency", help="one batch after the other through a PagedGenerator")
    for parser, measure in ((many, _throughput), (batches, _latency)):
        parser.set_defaults(run=_bench, measure=measure)
        parser.add_argument("model", help="a checkpoint's folder, or a model id")
        parser.add_argument("--dtype", default="auto")
        parser.add_argument("--device", help="left out: CUDA where there is a GPU")
        parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
        parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of PagedConfig")
        parser.add_argument("--prompt-tokens", type=_positive, default=512, help="of each prompt")
        parser.add_argument("--output-tokens", type=_positive, default=128, help="of each answer")
        parser.add_argument("--seed", type=int, default=0, help="of prompts")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    many.add_argument("--num-prompts", type=_positive, default=256)
    batches.add_argument("--batch-size", type=_positive, default=1)
    batches.add_argument("--rounds", type=_positive, default=10, help="those that count; two more come first")


def _positive(text: str) -> int:
    return count(text, 1)


def _bench(arguments: argparse.Namespace) -> int:
    """Measure what the arguments say, print a line, and write the figures."""
    with hf_paged.PagedGenerator.from_pretrained(
            arguments.model, dtype=arguments.dtype, device=arguments.device,
            tensor_parallel_size=arguments.tensor_parallel_size, **read_pairs(arguments.set)) as generator:
        report = arguments.measure(generator, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _throughput(generator: hf_paged.PagedGenerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time one call with all prompts, after a smaller call that compiles kernels and captures graphs; prints a line."""
    _generate(generator, arguments, min(8, arguments.num_prompts), 0)
    seconds = _generate(generator, arguments, arguments.num_prompts, 1)
    total_in = arguments.num_prompts * arguments.prompt_tokens
    total_out = arguments.num_prompts * arguments.output_tokens
    report = {"kind": "throughput", "model": arguments.model, "num_prompts": arguments.num_prompts,
              "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens, "seconds": seconds,
              "requests_per_second": arguments.num_prompts / seconds, "output_tokens_per_second": total_out / seconds,
              "total_tokens_per_second": (total_in + total_out) / seconds}
    print(f"{seconds:.2f} s: {report['requests_per_second']:.2f} requests/s, "
          f"{report['output_tokens_per_second']:,.0f} output tokens/s, "
          f"{report['total_tokens_per_second']:,.0f} tokens/s with the prompts'")
    return report


def _latency(generator: hf_paged.PagedGenerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time calls of one batch each, with new prompts in each call; prints a line."""
    import numpy as np

    taken = [_generate(generator, arguments, arguments.batch_size, i) for i in range(arguments.rounds + _WARM_UPS)]
    counted = taken[_WARM_UPS:]
    p50, p90, p99 = np.percentile(counted, [50, 90, 99]).tolist()
    print(f"batches of {arguments.batch_size}: median {p50:.3f} s, 90 % within {p90:.3f} s, "
          f"99 % within {p99:.3f} s; {1000 * p50 / arguments.output_tokens:.2f} ms a token")
    return {"kind": "latency", "model": arguments.model, "batch_size": arguments.batch_size,
            "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens,
            "rounds": arguments.rounds,
            "seconds": {"mean": sum(counted) / len(counted), "p50": p50, "p90": p90, "p99": p99}}


def _generate(generator: hf_paged.PagedGenerator, arguments: argparse.Namespace, count: int, number: int) -> float:
    """Return the seconds of one call with prompts of its own, which the prefix cache cannot hold yet."""
    rng = random.Random(f"{arguments.seed} {number} {count}")
    vocabulary = generator.engine.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(count)]
    started = time.perf_counter()
    made = generator.generate(prompts, max_new_tokens=arguments.output_tokens, eos_token_id=None, do_sample=False,
                              min_new_tokens=arguments.output_tokens, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(completion.token_ids) != arguments.output_tokens for completion in made):
        ends = sorted({f"{one.finish_reason}: {one.error}" for one in made})
        raise RuntimeError(f"answers shorter than {arguments.output_tokens} tokens: {'; '.join(ends)}")
    return seconds
