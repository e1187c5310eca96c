"""A runner and a scheduler on a GPU that nobody has: the graphs and kernels that requests need after the engine is
ready, for scripts in a process of their own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pretended_gpu import OnGpu, compile_nothing, pretend, variants
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_paged.kernels.build import compiling
from hf_paged.kernels.comm._peers import MAX_PROGRAMS, Peers
from hf_paged.models import find_executor
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.peers import CAPACITY, PeerBuffers
from hf_paged.parallel.plan import parallelize
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.graphs import Captured, StepGraphs
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import prompt_sizes
from hf_paged.runner.prompt_scores import Wanted
from hf_paged.runner.recurrent.recurrent_runner import RecurrentRunner, part_of
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.table import Drawing
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import Scheduler, SchedulerConfig
from hf_paged.scheduler import Sequence as Request

SAMPLED = Drawing(do_sample=True, temperature=0.6)
MOST_LENGTH, MOST_TOKENS, MOST_ROWS = 40_960, 8192, 256
_TOKEN = 7  # which every step samples


@contextmanager
def nobodys_gpu() -> Iterator[None]:
    """Kernels are told apart but neither compiled nor launched, and products come to zeros."""
    pretend()
    compile_nothing()
    zeros: dict[torch.dtype, torch.Tensor] = {}

    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Zeros of one memory for all, which nobody writes."""
        size = math.prod(shape)
        if dtype not in zeros or len(zeros[dtype]) < size:
            zeros[dtype] = torch.zeros(size, dtype=dtype)
        return zeros[dtype][:size].view(shape)

    own_cat = torch.cat

    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """Products side by side are as little worth their time as one of them."""
        first = tensors[0]
        if not first.is_floating_point():
            return own_cat(tensors, dim)
        shape = list(first.shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        return made(first.dtype, *shape)

    own_histc = torch.histc
    torch.histc = lambda numbers, *args, **named: own_histc(numbers.float(), *args, **named)  # a CPU counts floats only
    torch.cat = cat
    torch.Tensor.record_stream = torch.cuda.current_stream = lambda *_: None
    torch.nn.functional.linear = lambda x, weight, bias=None: made(x.dtype, *x.shape[:-1], weight.shape[0])
    torch.nn.functional.embedding = lambda ids, weight, *_, **__: made(weight.dtype, *ids.shape, weight.shape[1])
    with OnGpu(), torch.inference_mode():
        yield


def one_of_two(rank: int) -> ParallelGroup:
    """A rank that has met the other one, and reaches its memory: kernels are not launched, and torch sends nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = ParallelGroup(rank, 2)
    group._devices = group._hosts = dist.group.WORLD
    memory = torch.empty(16, dtype=torch.uint8)
    counters, abort = torch.zeros(MAX_PROGRAMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    group.buffers = PeerBuffers(Peers((memory, memory), counters, abort, rank, CAPACITY), memory, None)
    return group


def qwen3(num_layers: int, group: ParallelGroup = SINGLE) -> Qwen3ForCausalLM:
    """The layers of Qwen3-0.6B, so many of them, with a small vocabulary; a rank's part of them."""
    config = Qwen3Config(vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                         num_key_value_heads=8, head_dim=128, num_hidden_layers=num_layers,
                         max_position_embeddings=MOST_LENGTH)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
        if group.is_parallel:
            with _honest_devices():
                parallelize(model.to("meta"), group)
    return _on_cpu(model)


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """Two layers of eight experts, of which a token takes two."""
    config = Qwen3MoeConfig(vocab_size=4096, hidden_size=256, moe_intermediate_size=64, num_attention_heads=16,
                            num_key_value_heads=8, head_dim=128, num_hidden_layers=2, num_experts=8,
                            num_experts_per_tok=2, max_position_embeddings=MOST_LENGTH)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return _on_cpu(model)


@contextmanager
def _honest_devices() -> Iterator[None]:
    """Tensors lie where they are put, as on the meta device, and say so."""
    pretended = {name: torch.Tensor.__dict__[name] for name in OnGpu._asked.values()}
    for name in pretended:
        delattr(torch.Tensor, name)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for name, answer in pretended.items():
            setattr(torch.Tensor, name, answer)


def _on_cpu(model: Any) -> Any:
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


class Service:
    """Requests of a model, step by step, with the engine's own scheduler, state and choice of graphs.

    Args:
        num_parameters: of the model that it stands for, which decides the sizes of steps.
        most_rows: requests at a time.
    """

    def __init__(self, model: Any, *, num_parameters: int = 596_000_000, num_blocks: int = 40_000,
                 backend: str = "hopper", autocast: torch.dtype | None = None, most_rows: int = MOST_ROWS) -> None:
        self.model = base = model.get_base_model() if hasattr(model, "get_base_model") else model
        executor = find_executor(base)(base, merge_weights=False)
        executor.autocast = autocast
        self.num_blocks, self.most_rows = num_blocks, most_rows
        kind = partial(RecurrentRunner, num_snapshots=8) if executor.has_states else ModelRunner
        self.runner = kind(executor, executor.kv_spec(), block_size=16, num_blocks=num_blocks, max_num_seqs=most_rows,
                           max_model_len=MOST_LENGTH, max_num_batched_tokens=MOST_TOKENS, attention_backend=backend)
        runner = self.runner
        runner.follow_stream = lambda: None
        runner._on_host = lambda size, dtype: torch.empty(size, dtype=dtype)
        runner._handle, runner._compiles = lambda *results: None, False
        runner.prepare()
        self.graphs = StepGraphs(executor, runner.cache, runner.state, runner.attention, MOST_TOKENS)
        self.graphs.steps._num_parameters = num_parameters
        if not executor.has_states:
            self.graphs.steps.prompt_sizes = np.array(prompt_sizes(num_parameters, MOST_TOKENS) or [0])
        self.graphs._capture, self.graphs._aside = self._capture, nullcontext
        self.graphs._run_compiled = lambda run, shape, num_rows: self._run(run)
        self.graphs.check()

    def _capture(self, run: partial, arrays: tuple[np.ndarray, ...], name: str) -> Captured:
        self.graphs.num_captured += 1
        self.graphs._graphs.append(_Graph())
        return Captured(name, self.graphs._graphs[-1], (), None)

    def _run(self, step: Callable[[], object]) -> None:
        step()

    def get_ready(self, *, optional: bool = False) -> dict[str, int]:
        """Do what a `PagedGenerator` does before its first request; returns variants by kernel.

        Args:
            optional: as for `dry_runs`.
        """
        before = len(variants)
        scheduler, executor = self.scheduler(enable_prefix_caching=False), self.runner.executor
        count = 1 if executor.has_states and not executor.packs_prompts else self.most_rows
        length = min(MOST_TOKENS // count, MOST_LENGTH - 1)
        for i in range(count):
            scheduler.add(Request(f"largest-{i}", [0] * length, max_new_tokens=1))
        plan = scheduler.schedule()
        every = Drawing(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, min_p=0.05)
        self.runner._begin(plan, [SlotRow.of(every, max_length=length + 1)] * count)
        self._eagerly(plan)
        for run in dry_runs(self.graphs.steps, self.most_rows, MOST_TOKENS, optional=optional):
            run()
        return dict(Counter(variant.name for variant in variants[before:]))

    def get_ready_dry(self) -> dict[str, int]:
        """Look at the steps of `get_ready`, but for the largest one, in dry runs; returns variants by kernel."""
        before, dry = len(variants), compiling._DryRun()
        for run in dry_runs(self.graphs.steps, self.most_rows, MOST_TOKENS, optional=True):
            dry.run(run)
        dry.pool.shutdown()
        dry.settle(list(dry.pending))
        return dict(Counter(variant.name for variant in variants[before:]))

    def scheduler(self, **changes: Any) -> Scheduler:
        return Scheduler(SchedulerConfig(**{
            "block_size": 16, "num_blocks": self.num_blocks, "max_num_seqs": self.most_rows,
            "max_num_batched_tokens": MOST_TOKENS, "max_model_len": MOST_LENGTH, "enable_prefix_caching": True,
            "num_snapshots": self.runner.num_snapshots, "whole_prompts": self.runner.whole_prompts,
            "group_prefixes": not self.runner.executor.has_states, **changes}))

    def _pieces(self, plan: Any) -> list[Any]:
        """Return the parts of a step that run by themselves: of models with states, decode rows and prompts."""
        count, rows = plan.num_decode_rows, list(range(len(plan.slots)))
        if not self.runner.executor.has_states or not 0 < count < len(rows):
            return [plan]
        start, end = plan.start, plan.start + plan.num_new_tokens
        return [part_of(plan, rows[of], start[of], end[of], num_decode_rows=number)
                for of, number in ((slice(count), count), (slice(count, None), 0))]

    def _eagerly(self, plan: Any, scored: Sequence[str] = ()) -> None:
        computed = self.runner._hidden_states(plan, every_token=False)
        scores = {name: torch.empty(len(plan.slots)) for name in scored}
        self.runner._sample(plan, computed, torch.empty(len(plan.slots), dtype=torch.int64), scores)

    def _under_masks(self, plan: Any, rows: list[SlotRow], scored: tuple[str, ...]) -> None:
        masks = HostMasks(torch.zeros(1, 4096 // 32, dtype=torch.int32), np.zeros(int(plan.samples.sum()), np.int32))
        self.runner.sample(self.runner.launch_unsampled(plan, rows, Wanted(scored)), masks)

    def serve(self, name: str, prompts: list[list[int]], lengths: list[int], drawing: Drawing = SAMPLED, *,
              scheduler: Scheduler | None = None, scored: tuple[str, ...] = (), adapter: str | None = None,
               masked: bool = False, num_guesses: int = 0, **settings: Any) -> dict[str, Any]:
        """Serve requests to their end; returns what they needed: graphs by kind, graphs dropped, padded steps that ran
        without one, eager steps, variants by kernel.

        Args:
            masked: tokens are sampled under masks, in steps that run eagerly.
            num_guesses: tokens that every request guesses in every step, rightly.
            settings: as for `SlotRow.of`.
        """
        scheduler = scheduler or self.scheduler()
        before, dropped, known = len(variants), Counter(self.graphs.dropped_by), set(self.graphs._captured)
        rows, requests = {}, []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            request = Request(f"{name}-{i}", list(prompt), max_new_tokens=length, adapter=adapter)
            rows[request.request_id] = SlotRow.of(drawing, max_length=len(prompt) + length, adapter=adapter, **settings)
            scheduler.add(request)
            requests.append(request)
        captured, eager, uncaptured = Counter(), 0, self.graphs._runs.total()
        while (plan := scheduler.schedule({r.slot: [_TOKEN] * num_guesses for r in requests if r.slot is not None}
                                          if num_guesses else {})) is not None:
            admitted = [rows[sequence.request_id] for sequence in plan.admitted]
            if masked:
                self._under_masks(plan, admitted, scored)
                scheduler.commit(plan, np.full(len(plan.slots), _TOKEN, np.int64))
                continue
            self.runner._begin(plan, admitted)
            for part in self._pieces(plan):
                if (parts := self.graphs._parts(part, scored)) is None:
                    eager += 1
                    self._eagerly(part, scored)
                for found, padded, _ in parts or ():
                    if not isinstance(found, Captured):
                        self.graphs._compute(found, padded)
            captured.update(shape.kind for shape in set(self.graphs._captured) - known)
            known = set(self.graphs._captured)
            scheduler.commit(plan, np.full(len(plan.slots), _TOKEN, np.int64))
        return {"captured": dict(captured), "dropped": dict(Counter(self.graphs.dropped_by) - dropped), "eager": eager,
                "uncaptured": self.graphs._runs.total() - uncaptured,
                "variants": dict(Counter(variant.name for variant in variants[before:]))}


class _Graph:
    def reset(self) -> None:
        pass
