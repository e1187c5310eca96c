"""Measure the error of log-probabilities against fp32: hf_paged in bf16 next to stock in bf16.

    python benchmarks/logprob_error.py [--model 0.6B] [--seeds 3] [--sequences 36] [--length 1024] [--autocast]
                                       [--out f.json]
    python benchmarks/logprob_error.py --lora float32        # rank-16 adapters of all linear layers, in this type
    python benchmarks/logprob_error.py --shared 6            # every 6 sequences share their first half
    python benchmarks/logprob_error.py --sequences 8 --one-launch        # or 1, 2, 4: steps by one launch

Random weights and tokens; with `--autocast` the weights stay fp32, and both compute under bf16 autocast. The first half
of each sequence goes through (chunked) prefill, the second half through decode steps whose sampled token is replaced by
the teacher's. The measure is |log p(next token) - fp32's|. With `--shared` and `--one-launch` decode steps alone count,
and run with and without it: groups that read the shared half once, one launch for all layers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM
from workloads import QWEN3_SHAPES, qwen3

from hf_paged import PagedConfig
from hf_paged.kernels.hopper.decoder_layers.shape import ROWS
from hf_paged.kernels.hopper.decoder_layers_support import why_not_on
from hf_paged.models import ModelExecutor, find_executor
from hf_paged.models.base import StepContext
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

LAYER_BY_LAYER = "layer by layer"
PATIENCE_S = 100.0


def token_log_probs(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
    """log p of `next_tokens` [N] under `logits` [N, V], float64 [N]."""
    return logits.float().log_softmax(-1).gather(1, next_tokens[:, None])[:, 0].double()


@torch.no_grad()
def stock(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [sequences, length - 1]."""
    return torch.stack([token_log_probs(model(row[None]).logits[0, :-1], row[1:]) for row in tokens])


@torch.no_grad()
def paged(executor: ModelExecutor, tokens: torch.Tensor, group_prefixes: bool = True) -> tuple[torch.Tensor, int]:
    """The same through scheduler and runner, nan where a prompt was cached; and the bytes that groups saved."""
    rows, length = tokens.shape
    half, config = length // 2, PagedConfig()
    num_blocks = rows * -(-length // config.block_size) + 1
    scheduler = Scheduler(SchedulerConfig(block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=rows,
                                          max_num_batched_tokens=4096, max_model_len=length,
                                          group_prefixes=group_prefixes))
    runner = ModelRunner(executor, executor.kv_spec(), block_size=config.block_size, num_blocks=num_blocks,
                         max_num_seqs=rows, max_model_len=length, max_num_batched_tokens=4096,
                         attention_backend="auto")
    result = torch.full((rows, length - 1), torch.nan, dtype=torch.float64, device=tokens.device)
    for row in range(rows):
        scheduler.add(Sequence(str(row), tokens[row, :half].tolist(), max_new_tokens=length - half))
    own_hidden_states = executor.hidden_states
    step: dict = {}

    def hidden_states(input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Scores all tokens, and those that are the last of a row as the step has them."""
        every = own_hidden_states(input_ids, context._replace(ends=None))
        hidden = every if context.ends is None else own_hidden_states(input_ids, context)
        scored = every if context.ends is None else every.index_copy(0, context.ends.tokens, hidden)
        plan = step["plan"]
        last = np.cumsum(plan.num_new_tokens)
        for i, sequence in enumerate(plan.sequences):
            row, start, count = int(sequence.request_id), int(plan.start[i]), int(plan.num_new_tokens[i])
            own = scored[last[i] - count : last[i]]
            result[row, start : start + count] = token_log_probs(
                executor.logits(own), tokens[row, start + 1 : start + count + 1]
            )
        return hidden

    def teacher(logits: torch.Tensor, slots: torch.Tensor, position: torch.Tensor, *_: object) -> torch.Tensor:
        owner = [int(step["plan"].sequences[row].request_id) for row in np.flatnonzero(step["plan"].samples)]
        taught = tokens[torch.tensor(owner, device=tokens.device), position]
        runner.state.tokens[slots, position] = taught.to(torch.int32)
        return taught

    runner.prepare()
    executor.refresh(None)
    greedy = SlotRow.of(max_length=length)
    executor.hidden_states, runner.state.sample = hidden_states, teacher  # type: ignore[method-assign, assignment]
    while scheduler.num_waiting + scheduler.num_running:
        step["plan"] = plan = scheduler.schedule()
        scheduler.commit(plan, runner.launch(plan, [greedy] * len(plan.admitted)).wait())
    del executor.hidden_states
    assert not result[:, half:].isnan().any()
    return result, runner.reads.num_saved_bytes


def measured(model: Qwen3ForCausalLM, tokens: torch.Tensor, autocast: torch.dtype | None, one_launch: bool,
             group_prefixes: bool) -> tuple[torch.Tensor, int]:
    """`paged` of a model; by one launch once its kernel is compiled, which the first steps begin."""
    executor_class = find_executor(model)
    assert executor_class is not None
    executor = executor_class(model, one_launch=one_launch)
    executor.autocast = autocast
    deadline = time.monotonic() + PATIENCE_S
    while True:
        at_once = executor.uses_one_launch(len(tokens))
        found = paged(executor, tokens, group_prefixes)
        if at_once or not one_launch:
            executor.release()
            return found
        assert time.monotonic() < deadline, f"no kernel for {len(tokens)} rows"


def with_adapters(model: Qwen3ForCausalLM, dtype: torch.dtype) -> None:
    """PEFT's, in place, with values that `dtype` holds; their share of a product is about a tenth of the base's."""
    import peft

    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=18)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--autocast", action="store_true", help="fp32 weights under bf16 autocast")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lora", choices=["float32", "bfloat16"])
    parser.add_argument("--shared", type=int, default=1, help="sequences that share their first half")
    parser.add_argument("--one-launch", action="store_true", help="of all layers, which takes 1, 2, 4 or 8 sequences")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one_launch and (args.sequences not in ROWS or args.shared > 1 or args.lora or args.autocast
                            or why_not_on(torch.device(args.device)) is not None):
        parser.error(f"--one-launch: expected one of {ROWS} --sequences, no --shared, --lora or --autocast, and a GPU "
                     "that has the kernel")
    names = {"hf_paged bf16": True}  # with groups and one launch, where they are asked for?
    if args.shared > 1 or args.one_launch:
        names["without groups" if args.shared > 1 else LAYER_BY_LAYER] = False
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ("stock bf16", *names)}
    for seed in range(args.seeds):
        model = qwen3(args.model, torch.float32, args.device, seed)
        generator = torch.Generator().manual_seed(seed)
        shape, vocabulary = (args.sequences, args.length), model.config.vocab_size
        tokens = torch.randint(0, vocabulary, shape, generator=generator).to(args.device)
        half = args.length // 2
        for first in range(0, args.sequences, args.shared):
            tokens[first : first + args.shared, :half] = tokens[first, :half].clone()
        counted = slice(half if len(names) > 1 else 0, None)
        if not args.autocast:  # the reference has the bf16 weights, so that only arithmetic differs
            model = model.to(torch.bfloat16).float()
        if args.lora:
            with_adapters(model, getattr(torch, args.lora))
        exact = stock(model, tokens)
        adapters = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
        if not args.autocast:
            model = model.to(torch.bfloat16)
        for name, values in adapters.items():
            model.get_parameter(name).data = values.to(getattr(torch, args.lora))
        with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
            lower = stock(model, tokens)
        errors["stock bf16"].append((lower - exact)[:, counted].abs().flatten())
        for name, grouped in names.items():
            ours, saved_bytes = measured(model, tokens, torch.bfloat16 if args.autocast else None,
                                         args.one_launch and grouped, grouped)
            if args.device == "cuda":  # where groups are read as such
                assert (saved_bytes > 0) == (grouped and args.shared > 1), (name, saved_bytes)
            errors[name].append((ours - exact)[:, counted].abs().flatten())
        del model
    figures = {}
    for name, parts in errors.items():
        everything = torch.cat(parts)
        figures[name] = {"tokens": everything.numel(), "mean": everything.mean().item(),
                         "p99": np.quantile(everything.cpu().numpy(), 0.99).item()}
        print(f"{name:14} {figures[name]}")
    for name, most in {"stock bf16": 1.1, "without groups": 1.02, LAYER_BY_LAYER: 1.05}.items():
        if name in figures:
            mean, p99 = (figures["hf_paged bf16"][key] / figures[name][key] for key in ("mean", "p99"))
            print(f"ratio to {name}: mean {mean:.3f}, p99 {p99:.3f} (at most {most})")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
