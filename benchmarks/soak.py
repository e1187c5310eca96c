"""Run every kind of call over threads, for a while, and compare each with stock's result.

    python benchmarks/soak.py [--seconds 180] [--calls 0] [--device cuda] [--threads 3] [--no-server]

Rounds of shuffled calls run in a pool of threads; after each round nothing runs, and blocks, memory and objects are
counted. Stock's results come from deep copies, before anything is enabled. Exits with 1 on a breach:

* a wrong result, or an exception that stock does not raise;
* a block that is taken, or a request that is open, while no call runs;
* growth after the warm-up, which is the first half of the rounds: of the medians over the third and the last quarter,
  the process' memory by more than 2 % and 24 MiB, Python's objects by more than 1 % and 2,000, the device's memory by
  more than 1 MiB (from 12 rounds on);
* a CUDA graph dropped after the warm-up, of the model that stays unchanged.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import threading
import time
import traceback
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3Config, Qwen3ForCausalLM

import hf_paged

TRAINED = Path(__file__).resolve().parent.parent / "examples/models/tiny-qwen3"
CALLS_A_KIND = 2  # in a round
WIDE = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}


def make_model(device: str, seed: int = 0) -> Qwen3ForCausalLM:
    """A tiny random model in fp32, whose greedy choices have margins far above rounding."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
                         initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None,
                         eos_token_id=None)
    return Qwen3ForCausalLM(config).eval().to(device)


def make_batch(device: str, seed: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of some length."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 256) for _ in range(rng.randint(3, 60))] for _ in range(rng.randint(1, 5))]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids.to(device), "attention_mask": (ids != 0).long().to(device)}


class Scaled(LogitsProcessor):
    """Sends a call to lockstep."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 0.5


class Broken(Exception):
    """What the failing streamer raises."""


class FailingStreamer:
    """Fails at its fourth column."""

    def __init__(self) -> None:
        self.columns = 0

    def put(self, value: torch.Tensor) -> None:
        self.columns += 1
        if self.columns == 4:
            raise Broken

    def end(self) -> None:
        pass


class Case(NamedTuple):
    """A call of `generate`, and what stock makes of it: tokens, or the type of an exception."""

    kwargs: dict[str, Any]
    expected: Any


def outcome(model: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return model.generate(**kwargs)
    except Exception as error:
        return type(error)


class Soak:
    """The models, the calls with stock's results, and what went wrong."""

    def __init__(self, device: str, seed: int, server: bool) -> None:
        self.device, self.rng = device, random.Random(seed)
        self.model, self.edited, adapted = (make_model(device, seed + i) for i in range(3))
        self.edit_lock, self.adapter_lock, self.step_lock = (threading.Lock() for _ in range(3))
        self.is_negated = False
        self.cases = {
            "native": self._cases({"max_new_tokens": 16}, {"max_new_tokens": 9, "eos_token_id": [7, 90]},
                                  {"max_new_tokens": 8, "repetition_penalty": 1.3, "suppress_tokens": [4]}),
            "lockstep": self._cases({"max_new_tokens": 8, "logits_processor": LogitsProcessorList([Scaled()])},
                                    {"max_new_tokens": 7, "top_h": 0.5, "do_sample": False}),
            "beams": self._cases({"max_new_tokens": 7, "num_beams": 3}),
            "bad settings": self._cases({"max_new_tokens": 4, "num_beams": 0}, {"max_new_tokens": -3},
                                        {"max_new_tokens": 3, "suppress_tokens": ["a"]}),
        }
        self.plain = make_batch(device, 99)
        self.edits = [Case(self._greedy(12), None)._replace(expected=self._of_edited(sign)) for sign in (1.0, -1.0)]
        self.peft, self.adapted = self._adapt(adapted)
        self.failing = {**self._greedy(12)}
        hf_paged.enable(self.model)
        hf_paged.enable(self.edited)
        hf_paged.enable(self.peft)
        self.manager = self.model.init_continuous_batching()
        self.manager.start()
        self.server = Server(device) if server else None
        self.kinds: dict[str, Callable[[random.Random], Any]] = {
            **{name: self._call_of(name) for name in self.cases},
            "failing streamer": self.fail_streaming, "abort": self.abort, "weight edit": self.edit,
            "adapter": self.adapter, "deep copy": self.deep_copy, "generate_batch": self.batch,
            "running manager": self.managed,
        }
        if self.server is not None:
            self.kinds["server"] = self.server.ask
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _greedy(self, new_tokens: int, **kwargs: Any) -> dict[str, Any]:
        return {**self.plain, **WIDE, "max_new_tokens": new_tokens, **kwargs}

    def _cases(self, *settings: dict[str, Any]) -> list[Case]:
        stock = copy.deepcopy(self.model)
        calls = [{**make_batch(self.device, 10 * i + j), **WIDE, **kwargs}
                 for j, kwargs in enumerate(settings) for i in range(3)]
        return [Case(kwargs, outcome(stock, kwargs)) for kwargs in calls]

    def _of_edited(self, sign: float) -> torch.Tensor:
        stock = copy.deepcopy(self.edited)
        with torch.no_grad():
            stock.model.layers[0].self_attn.q_proj.weight.mul_(sign)
        return stock.generate(**self._greedy(12))

    def _adapt(self, model: Any) -> tuple[Any, dict[bool, torch.Tensor]]:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(model, config).eval()
        with_adapter = wrapped.generate(**self._greedy(10))
        with wrapped.disable_adapter():
            return wrapped, {True: with_adapter, False: wrapped.generate(**self._greedy(10))}

    # -- kinds of calls -----------------------------------------------------------------------------------------------

    def _call_of(self, name: str) -> Callable[[random.Random], Any]:
        def call(rng: random.Random) -> None:
            case = rng.choice(self.cases[name])
            same(outcome(self.model, case.kwargs), case.expected)

        return call

    def fail_streaming(self, rng: random.Random) -> None:
        extra = rng.choice([{}, {"logits_processor": LogitsProcessorList([Scaled()])}])
        rows = {name: value[:1] for name, value in self.plain.items()}
        same(outcome(self.model, self.failing | rows | extra | {"streamer": FailingStreamer()}), Broken)

    def abort(self, rng: random.Random) -> None:
        engine = hf_paged.get_engine(self.model)
        with self.step_lock:
            name = engine.add_request([rng.randrange(1, 256) for _ in range(20)])
            for _ in range(rng.randint(0, 5)):
                engine.step()
            with suppress(KeyError):  # it was done
                engine.abort(name)
            while engine.has_unfinished():
                engine.step()

    def edit(self, rng: random.Random) -> None:
        with self.edit_lock:
            if rng.random() < 0.7:
                self.is_negated = not self.is_negated
                with torch.no_grad():
                    weight = self.edited.model.layers[0].self_attn.q_proj.weight
                    (weight if rng.random() < 0.5 else weight.data).neg_()
            case = self.edits[self.is_negated]
            same(self.edited.generate(**case.kwargs), case.expected)

    def adapter(self, rng: random.Random) -> None:
        with self.adapter_lock:
            same(self.peft.generate(**self._greedy(10)), self.adapted[True])
            with self.peft.disable_adapter():
                same(self.peft.generate(**self._greedy(10)), self.adapted[False])

    def deep_copy(self, rng: random.Random) -> None:
        copied = hf_paged.enable(copy.deepcopy(self.model))
        case = rng.choice(self.cases["native"])
        same(copied.generate(**case.kwargs), case.expected)
        if rng.random() < 0.5:
            hf_paged.disable(copied)

    def _rows(self, rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts without padding, and stock's first tokens after each."""
        case = self.cases["native"][rng.randrange(3)]
        ids, mask = case.kwargs["input_ids"], case.kwargs["attention_mask"].bool()
        prompts = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        return prompts, case.expected[:, ids.shape[1] :].tolist()

    def batch(self, rng: random.Random) -> None:
        prompts, expected = self._rows(rng)
        outputs = self.model.generate_batch(prompts, max_new_tokens=16, do_sample=False)
        same([output.generated_tokens for output in outputs.values()], expected)

    def managed(self, rng: random.Random) -> None:
        prompts, expected = self._rows(rng)
        names = [self.manager.add_request(prompt, max_new_tokens=16, streaming=rng.random() < 0.5, do_sample=False)
                 for prompt in prompts]
        gone = self.manager.add_request(prompts[0], max_new_tokens=100, do_sample=False)
        self.manager.cancel_request(gone)
        made = [[output for output in self.manager.request_id_iter(name) if output.is_finished()] for name in names]
        same([output.generated_tokens for [output] in made], expected)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def one(self, item: tuple[str, int]) -> None:
        name, seed = item
        try:
            self.kinds[name](random.Random(seed))
        except BaseException:
            self.wrong.append(f"{name} (seed {seed}): {traceback.format_exc(limit=-3)}")
        self.done[name] += 1

    def round(self, pool: ThreadPoolExecutor) -> dict[str, float]:
        """Every kind of call, shuffled; then what is left of them."""
        items = [(name, self.rng.randrange(1 << 30)) for name in self.kinds for _ in range(CALLS_A_KIND)]
        self.rng.shuffle(items)
        list(pool.map(self.one, items))
        return self.count()

    def count(self) -> dict[str, float]:
        """Nothing runs: what is taken, and how much memory there is."""
        leaked = 0
        engines = [hf_paged.get_engine(model) for model in (self.model, self.edited, self.peft)]
        deadline = time.monotonic() + 5.0  # the manager's thread ends a cancelled request when it comes to it
        while True:
            stats = [engine.stats() for engine in engines]
            leaked = sum(max(s.num_blocks - 1 - s.num_free_blocks, 0) + s.num_running + s.num_waiting for s in stats)
            if not leaked or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        gc.collect()
        on_gpu = self.device.startswith("cuda")
        return {
            "leaked": leaked, "RSS MiB": _rss() / 2**20, "objects": len(gc.get_objects()),
            "device MiB": torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0,
            "graphs dropped": stats[0].num_graphs_dropped,
        }

    def close(self) -> None:
        self.manager.stop(hard_stop=True, timeout=10.0)
        if self.server is not None:
            self.server.close()


class Server:
    """The server in this process, with the trained tiny model."""

    def __init__(self, device: str) -> None:
        from local_server import LocalServer
        from transformers import AutoModelForCausalLM, AutoTokenizer

        stock = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(TRAINED)
        self.questions: list[tuple[list, str]] = []
        for i in range(3):
            table = f"Codes:\nred-fox: {1000 + i}\nbold-owl: {1777 + i}"
            chat = [{"role": "system", "content": table}, {"role": "user", "content": "What is the code of red-fox?"}]
            inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt",
                                                   return_dict=True).to(device)
            output = stock.generate(**inputs, max_new_tokens=16, do_sample=False)
            new_tokens = output[0, inputs["input_ids"].shape[1] :]
            self.questions.append((chat, tokenizer.decode(new_tokens, skip_special_tokens=True)))
        self._server = LocalServer(str(TRAINED), device, "float32")
        self.url = f"http://127.0.0.1:{self._server.port}/v1/chat/completions"

    def ask(self, rng: random.Random) -> None:
        chat, expected = rng.choice(self.questions)
        body = {"model": str(TRAINED), "messages": chat, "max_tokens": 16, "temperature": 0.0}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            same(json.load(reply)["choices"][0]["message"]["content"], expected)

    def close(self) -> None:
        self._server.close()


def same(actual: Any, expected: Any) -> None:
    """AssertionError where a result is not stock's."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        is_same = torch.equal(actual, expected)
    else:
        is_same = type(actual) is type(expected) and actual == expected
    if not is_same:
        raise AssertionError(f"got {actual}, stock gives {expected}")


def _rss() -> int:
    """Bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def breaches(soak: Soak, rounds: list[dict[str, float]]) -> list[str]:
    """What the file's head says must not be."""
    found = [f"wrong: {wrong}" for wrong in soak.wrong]
    if leaked := max(one["leaked"] for one in rounds):
        found.append(f"{leaked:.0f} blocks or requests leaked")
    if len(rounds) < 12:
        return found
    quarter = len(rounds) // 4
    third, last = rounds[-2 * quarter : -quarter], rounds[-quarter:]
    for name, share, slack in (("RSS MiB", 0.02, 24.0), ("objects", 0.01, 2000.0), ("device MiB", 0.0, 1.0)):
        before, after = (statistics.median(one[name] for one in part) for part in (third, last))
        if after - before > share * before + slack:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    if rounds[-1]["graphs dropped"] > third[0]["graphs dropped"]:
        found.append(f"graphs were dropped after the warm-up: {rounds[-1]['graphs dropped']:.0f} in all")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="no round begins after this time")
    parser.add_argument("--calls", type=int, default=0, help="nor after this number of calls; 0: no bound")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-server", action="store_true")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", hf_paged.FallbackWarning)
    if args.device == "cpu":
        torch.set_num_threads(1)
    soak = Soak(args.device, args.seed, server=not args.no_server)
    rounds: list[dict[str, float]] = []
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(args.threads) as pool:
            while time.monotonic() - begin < args.seconds and not 0 < args.calls <= soak.done.total():
                rounds.append(soak.round(pool))
    finally:
        soak.close()
    seconds = time.monotonic() - begin
    for name, count in soak.done.items():
        wrong = sum(text.startswith(f"{name} (") for text in soak.wrong)
        print(f"{name:18} {count:6} calls   {wrong} wrong")
    print(f"{soak.done.total()} calls in {seconds:.0f} s, {args.threads} threads, {len(rounds)} rounds, {args.device}")
    for name in rounds[0]:
        at = [rounds[i * (len(rounds) - 1) // 4][name] for i in range(5)]
        print(f"{name:18} " + "  ".join(f"{value:10.1f}" for value in at) + "   (start, quarters, end)")
    found = breaches(soak, rounds)
    print("\n".join(found) or "no breach")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
