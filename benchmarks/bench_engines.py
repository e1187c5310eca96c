"""Engines that run_all.py compares, each behind `open`, `prepare`, `run` and `close`.

`open` makes the engine ready for a workload and returns the seconds to the first token (None where it was open);
`prepare` empties the prefix cache and fills in what the workload wants cached; `run` returns tokens made, per request.
Only `run` is on the clock.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from techniques import WITHOUT, replaced
from transformers import GenerationConfig
from workloads import POSITIONS, YARN, Workload, generation_configs, limits, qwen3, qwen3_config

PATIENCE_S = 100.0  # with kernels that are compiled in the background

MODULES = {"ours": "hf_paged", "stock": "transformers", "generate_batch": "transformers", "vllm": "vllm",
           "nano-vllm": "nanovllm", "ours-autocast": "hf_paged", "stock-autocast": "transformers"}


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


class Engine:
    """What they share: the model in memory. ``overrides``: fields of our `PagedConfig`, or what `techniques` replaces.

    ``under_autocast``: fp32 weights under bf16 autocast, as a trainer has them.
    """

    holds_model = True
    under_autocast = False

    def __init__(self, size: str, device: str) -> None:
        self.size, self.device = size, device
        dtype = torch.float32 if self.under_autocast else dtype_of(device)
        self.model = qwen3(size, dtype, device) if self.holds_model else None
        self._settings: object = None

    def around(self) -> AbstractContextManager[Any]:
        """Entered for all that the engine does."""
        return torch.autocast(self.device, torch.bfloat16) if self.under_autocast else nullcontext()

    def open(self, workload: Workload, overrides: dict[str, Any]) -> float | None:
        settings = self.settings(workload, overrides)
        if settings == self._settings:
            return None
        self.close()
        if self.device == "cuda" and self.holds_model:
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.start(settings)
        self.first_token(workload.prompts[0][:64])
        self._settings = settings
        return time.perf_counter() - start

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        """What the engine must be started anew for."""
        return {"max_num_seqs": max(256, workload.num_requests)}

    def start(self, settings: Any) -> None: ...

    def first_token(self, prompt: list[int]) -> None:
        self.run(Workload([prompt], [1], 0.0))

    def prepare(self, workload: Workload) -> None: ...

    def run(self, workload: Workload) -> list[int]:
        raise NotImplementedError

    def settle(self) -> bool:
        """Wait for what is prepared in the background, as other engines prepare it before they are ready; was any?"""
        return False

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._settings = None


class Ours(Engine):
    generator: Any = None
    _replaced: ExitStack | None = None

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        return super().settings(workload, overrides) | limits(workload) | overrides

    def start(self, settings: Any) -> None:
        from hf_paged import PagedGenerator

        if WITHOUT in settings:
            self._replaced = replaced(settings[WITHOUT])
        self.generator = PagedGenerator(self.model, **{name: settings[name] for name in settings if name != WITHOUT})

    def prepare(self, workload: Workload) -> None:
        self.generator.engine.reset_prefix_cache()
        if workload.warm:
            self.first_token(workload.prompts[0][: workload.shared])

    def run(self, workload: Workload) -> list[int]:
        made = self.generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False)
        return [len(completion.token_ids) for completion in made]

    def settle(self) -> bool:
        one_launch = getattr(self.generator.engine._executor, "_one_launch", None)
        if one_launch is None:
            return False
        coming = one_launch._compiled
        if wait(coming.values(), timeout=PATIENCE_S).not_done:
            print(f"kernels are still being compiled after {PATIENCE_S:.0f} s: the row is without them", flush=True)
        compiled = {rows for rows, one in coming.items() if one.done() and one.exception() is None}
        return any(one_launch._plans.get(rows) for rows in compiled - one_launch._ready)  # the next run takes them

    def stats(self) -> dict[str, Any]:
        now = self.generator.engine.stats()
        return {"preemptions": now.num_preemptions, "blocks": now.num_blocks, "graphs": now.num_graphs_captured}

    def close(self) -> None:
        super().close()
        if self.generator is not None:
            self.generator.close()
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None


class Stock(Engine):
    """`model.generate`: one left-padded batch that runs to the longest output; tokens asked for count."""

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        return {}

    def run(self, workload: Workload) -> list[int]:
        longest, most = max(map(len, workload.prompts)), max(workload.output_lengths)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in workload.prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in workload.prompts], device=self.device)
        config = generation_configs(workload._replace(output_lengths=[most]))[0]
        made = self.model.generate(ids, attention_mask=mask, generation_config=config, pad_token_id=0)
        assert made.shape == (workload.num_requests, longest + most)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [n for n in workload.output_lengths for _ in range(workload.samples)]


class OursUnderAutocast(Ours):
    under_autocast = True

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"shadow_bytes": self.generator.engine.stats().shadow_bytes}


class StockUnderAutocast(Stock):
    under_autocast = True


class GenerateBatch(Engine):
    """transformers' continuous batching through its manager, which takes a length per request; kept open."""

    def __init__(self, size: str, device: str) -> None:
        super().__init__(size, device)
        self._open = ExitStack()
        self._manager: Any = None

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        return {"temperature": workload.temperature}

    def start(self, settings: Any) -> None:
        config = GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=1024)
        if settings["temperature"]:
            config.update(do_sample=True, temperature=settings["temperature"], top_k=0)
        self._manager = self._open.enter_context(
            self.model.continuous_batching_context_manager(generation_config=config, block=True)
        )

    def run(self, workload: Workload) -> list[int]:
        order: dict[str, int] = {}
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
            for _ in range(workload.samples):
                order[self._manager.add_request(prompt, max_new_tokens=length)] = len(order)
        made = [0] * len(order)
        while order:
            result = self._manager.get_result(timeout=1.0)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the manager's thread ended")
            if result is not None and result.is_finished():
                made[order.pop(result.request_id)] = len(result.generated_tokens)
        return made

    def close(self) -> None:
        super().close()
        self._open.close()


class Vllm(Engine):
    """vLLM's offline `LLM` with dummy weights of the same shapes; ready counts the making of the weights, too."""

    holds_model = False
    llm: Any = None

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        return {"max_model_len": POSITIONS} | limits(workload)  # else its own choices, for all workloads

    def start(self, settings: Any) -> None:
        from vllm import LLM

        folder = TemporaryDirectory()
        length = settings["max_model_len"]
        config = qwen3_config(self.size, YARN if length > POSITIONS else None)
        config.max_position_embeddings = max(POSITIONS, length)  # beyond these it takes no prompt
        config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
        config.save_pretrained(folder.name)
        self._folder = folder
        self.llm = LLM(folder.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                       max_model_len=length, enable_prefix_caching=True)

    def prepare(self, workload: Workload) -> None:
        self.llm.reset_prefix_cache()
        if workload.warm:
            self.first_token(workload.prompts[0][: workload.shared])

    def run(self, workload: Workload) -> list[int]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(n=workload.samples, temperature=workload.temperature, max_tokens=length, ignore_eos=True,
                           detokenize=False)
            for length in workload.output_lengths
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [len(completion.token_ids) for output in outputs for completion in output.outputs]


class NanoVllm(Engine):
    """nano-vllm, from a checkpoint with random weights; ready counts its loading, too."""

    holds_model = False
    llm: Any = None

    def settings(self, workload: Workload, overrides: dict[str, Any]) -> Any:
        return {}

    def start(self, settings: Any) -> None:
        from nanovllm import LLM
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        self._folder = TemporaryDirectory()
        qwen3(self.size, torch.bfloat16, self.device).save_pretrained(self._folder.name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})), eos_token="a")
        tokenizer.save_pretrained(self._folder.name)
        torch.cuda.empty_cache()
        self.llm = LLM(str(Path(self._folder.name)), enforce_eager=False, max_model_len=8192)

    def prepare(self, workload: Workload) -> None:
        self.llm.scheduler.block_manager.hash_to_block_id.clear()
        if workload.warm:
            self.first_token(workload.prompts[0][: workload.shared])

    def run(self, workload: Workload) -> list[int]:
        from nanovllm import SamplingParams

        pairs = [
            # It knows no greedy search; the lowest temperature that it takes is as fast.
            (prompt, SamplingParams(temperature=workload.temperature or 0.01, max_tokens=length, ignore_eos=True))
            for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True)
            for _ in range(workload.samples)
        ]
        outputs = self.llm.generate([p for p, _ in pairs], [s for _, s in pairs], use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]


ENGINES: dict[str, type[Engine]] = {"ours": Ours, "stock": Stock, "generate_batch": GenerateBatch, "vllm": Vllm,
                                    "nano-vllm": NanoVllm}
UNDER_AUTOCAST: dict[str, type[Engine]] = {"ours-autocast": OursUnderAutocast, "stock-autocast": StockUnderAutocast}
