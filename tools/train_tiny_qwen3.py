"""Make `examples/models/tiny-qwen3`: a Qwen3 of about 1.5 M parameters that answers from its context.

The script writes its own training text (nothing is downloaded), trains a byte-level BPE tokenizer and the model on
it, stores both, and measures what it stored with stock transformers on held-out examples. Four tasks, each answered
in one short chat turn that ends in `<|im_end|>`:

* lookup: the system prompt is a table of facts, `amber-otter: 4821`, one a line; the user asks for one of them;
* copy: repeat a list of words; * count: count from one number to another; * sum: add a digit to a two-digit number.

    python tools/train_tiny_qwen3.py                       # train on the GPU (minutes), evaluate, write everything
    python tools/train_tiny_qwen3.py --eval-only           # measure the stored model again, on this machine
    python tools/train_tiny_qwen3.py --smoke --out /tmp/x  # every step of the way, too short to learn anything

Exits 1 when a target is missed: 99 % of the held-out look-ups right in fp32 and in bf16, and the smallest margin at
least 8 times the largest bf16-fp32 logit difference (see `logit_figures` for what exactly is compared).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

Message = dict[str, str]
Example = tuple[list[Message], str]

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-qwen3"
EVAL_SEED = 20_000_001  # the test set is the same for every training seed
VOCAB_SIZE = 896  # of the model; the tokenizer uses 861, each word of the text is one
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_ACCURACY, MIN_MARGIN_RATIO = 0.99, 8.0
ROW_LENGTHS = (320, 640, 1152, 2304)  # tokens in a training row; the later ones join as training goes on
HEAD_START = (0.0, 0.12, 0.25, 0.45)  # the share of the steps after which each length joins
TARGET_MARGIN = 14.0  # logits; the hinge term of the loss pushes every answer token's margin to at least this

ADJECTIVES = (  # noqa: SIM905
    "amber azure bold brave brief bright brown calm clear cold cool crisp dark dear deep dry dusty early fair fast "
    "fine firm fond free fresh glad gold grand great green happy hardy high icy jade keen kind large late light "
    "lime long loud lucky mild mint neat new noble odd old pale pink plain proud pure quick quiet rare red rich "
    "ripe royal wild"
).split()
ANIMALS = (  # noqa: SIM905
    "ant ape bat bear bee bird bison boar camel cat clam cod cow crab crane crow deer dog dove duck eagle eel elk "
    "emu finch fish fly fox frog goat goose gull hare hawk hen heron horse ibex koala lark lion llama lynx mole "
    "moose moth mouse mule newt otter owl panda pig pony quail rat raven robin seal shark sheep snail swan tiger"
).split()

# Qwen3's own template without tools and thinking: ChatML.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Qwen's pre-tokenization, and the same for the ASCII text of this script (`Encoder` asserts that they agree).
PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII_PIECES = re.compile(r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


# ---- the text --------------------------------------------------------------------------------------------------------


def is_held_out(first: int, second: int) -> bool:
    """Whether the pair is kept out of training (one in eight, evenly over both numbers)."""
    return (first + 3 * second) % 8 == 0


KEYS: dict[bool, list[str]] = {
    held_out: [
        f"{adjective}-{animal}"
        for i, adjective in enumerate(ADJECTIVES)
        for j, animal in enumerate(ANIMALS)
        if is_held_out(i, j) == held_out
    ]
    for held_out in (True, False)
}


def draw_pair(rng: random.Random, first: range, second: range, held_out: bool) -> tuple[int, int]:
    """A random pair from the two ranges, on the wanted side of the held-out split."""
    while True:
        a, b = rng.choice(first), rng.choice(second)
        if is_held_out(a, b) == held_out:
            return a, b


def copy_turn(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Question and answer: repeat 3 to 12 different words (there are too many lists to need a split)."""
    words = " ".join(rng.sample(ADJECTIVES + ANIMALS, rng.randint(3, 12)))
    return f"Repeat: {words}", words


def count_turn(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Question and answer: count 3 to 12 steps from a two-digit number below 80."""
    start, steps = draw_pair(rng, range(10, 80), range(3, 13), held_out)
    return f"Count from {start} to {start + steps}.", " ".join(str(n) for n in range(start, start + steps + 1))


def sum_turn(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Question and answer: a two-digit number plus a digit."""
    a, b = draw_pair(rng, range(10, 100), range(10), held_out)
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}"


OTHER_TASKS: dict[str, Callable[[random.Random, bool], tuple[str, str]]] = {
    "copy": copy_turn,
    "count": count_turn,
    "sum": sum_turn,
}


def make_table(rng: random.Random, num_facts: int, held_out: bool) -> dict[str, str]:
    """`num_facts` facts with different keys: `{"amber-otter": "4821", ...}`."""
    return {key: f"{rng.randrange(10_000):04d}" for key in rng.sample(KEYS[held_out], num_facts)}


def table_message(table: dict[str, str]) -> Message:
    """The system prompt that holds the table."""
    return {"role": "system", "content": "Codes:\n" + "\n".join(f"{key}: {code}" for key, code in table.items())}


def lookup_turn(key: str, table: dict[str, str]) -> tuple[str, str]:
    """Question and answer about one fact of the table."""
    return f"What is the code of {key}?", f"{key}: {table[key]}"


def chat(system: Message | None, turns: list[tuple[str, str]]) -> Example:
    """The chat up to and with the last question, and the answer that should follow."""
    messages = [system] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages[:-1], messages[-1]["content"]


def make_lookup_example(rng: random.Random, num_facts: int, num_turns: int = 1, held_out: bool = True) -> Example:
    """A chat that asks `num_turns` times for a fact of the table in its system prompt.

    Args:
        rng: source of all randomness; equal states give equal examples.
        num_facts: facts in the table, 1 to 240; a fact takes 9 tokens, so 220 make a prompt of about 2,000 tokens.
        num_turns: different facts asked for, at most `num_facts`; all but the last come with their right answers.
        held_out: use only keys that never occur in training (the default), or only keys that do.

    Returns:
        The messages, the last one the user's last question, and the answer's text (without `<|im_end|>`).
    """
    table = make_table(rng, num_facts, held_out)
    keys = rng.sample(list(table), num_turns)
    return chat(table_message(table), [lookup_turn(key, table) for key in keys])


def make_task_example(rng: random.Random, task: str, held_out: bool = True) -> Example:
    """A chat of one turn of one of `OTHER_TASKS`, without a system prompt."""
    return chat(None, [OTHER_TASKS[task](rng, held_out)])


def make_training_turns(rng: random.Random, length: int) -> tuple[Message | None, list[tuple[str, str]]]:
    """A long chat for training: at least `length` tokens, most turns look-ups in its table."""
    table = make_table(rng, rng.randint(2, (length - 64) // 9), False) if rng.random() < 0.9 else {}
    turns: list[tuple[str, str]] = []
    tokens = 9 * len(table)
    while tokens < length:
        if table and rng.random() < 0.8:
            turns.append(lookup_turn(rng.choice(list(table)), table))
        else:
            turns.append(OTHER_TASKS[rng.choice(list(OTHER_TASKS))](rng, False))
        tokens += 20  # at least
    return (table_message(table) if table else None), turns


# ---- tokenizer and model ---------------------------------------------------------------------------------------------


def build_tokenizer(out: Path) -> Any:
    """Train the tokenizer, in the layout of Qwen3's, store it in `out` and load it from there."""
    rng = random.Random(0)
    lines = []
    for _ in range(400):
        system, turns = make_training_turns(rng, 640)
        lines += ([system["content"]] if system else []) + ["\n".join(("assistant", "user", *turn)) for turn in turns]
    lines += [f"system\n{word} {word}-{word}" for word in ADJECTIVES + ANIMALS] * 200
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(out)


def build_model(tokenizer: Any) -> Qwen3ForCausalLM:
    """The untrained model, in fp32."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(weight, 2.0)  # normed queries and keys: sharp attention needs large gains
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


# ---- training --------------------------------------------------------------------------------------------------------


class Encoder(dict[str, list[int]]):
    """Token ids of this script's text, many times faster than the tokenizer: a dictionary of pre-tokenized pieces."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, piece: str) -> list[int]:
        self[piece] = self.tokenizer.encode(piece, add_special_tokens=False)
        return self[piece]

    def row(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a rendered chat, and for each whether it belongs to an answer (its `<|im_end|>` included)."""
        ids: list[int] = []
        is_answer: list[bool] = []
        for message in messages:
            ids += self["<|im_start|>" + message["role"] + "\n"]
            is_answer += [False] * (len(ids) - len(is_answer))
            for piece in ASCII_PIECES.findall(message["content"]):
                ids += self[piece]
            ids += self["<|im_end|>"]
            is_answer += [message["role"] == "assistant"] * (len(ids) - len(is_answer))
            ids += self["\n"]
            is_answer += [False] * (len(ids) - len(is_answer))
        return ids, is_answer


class TrainingBatches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The batch of every step, drawn from `(seed, step)` alone: ids and answer mask, each [rows, row length]."""

    def __init__(self, tokenizer: Any, steps: int, tokens_per_step: int, seed: int, max_length: int) -> None:
        self.encoder = Encoder(tokenizer)
        self.steps, self.tokens_per_step, self.seed = steps, tokens_per_step, seed
        self.lengths = [n for n in ROW_LENGTHS if n <= max_length]
        messages, answer = make_lookup_example(random.Random(seed), 20, 5)
        messages.append({"role": "assistant", "content": answer})
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert self.encoder.row(messages)[0] == ids, "Encoder and tokenizer disagree"

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(self.seed * 1_000_003 + step)
        lengths = [n for n, start in zip(self.lengths, HEAD_START, strict=False) if step >= start * self.steps]
        length = rng.choices(lengths, weights=[2**i for i in range(len(lengths))])[0]
        rows = []
        for _ in range(max(1, self.tokens_per_step // length)):
            system, turns = make_training_turns(rng, length)
            messages, answer = chat(system, turns)
            rows.append(self.encoder.row([*messages, {"role": "assistant", "content": answer}]))
        ids = torch.tensor([ids[:length] for ids, _ in rows])
        return ids, torch.tensor([is_answer[:length] for _, is_answer in rows])


def answer_margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The target's logit less the largest other logit: [..., vocabulary], [...] -> [...]."""
    target = logits.gather(-1, targets[..., None])
    return target.squeeze(-1) - logits.scatter(-1, targets[..., None], -torch.inf).amax(-1)


def train(model: Qwen3ForCausalLM, tokenizer: Any, args: argparse.Namespace) -> None:
    """Train in place. The forward pass uses weights rounded to bf16 (and bf16 activations on a GPU), the ones stored;
    AdamW updates fp32 masters. Answer tokens carry the loss; a hinge on their margins joins half-way."""
    device = torch.device(args.device)
    compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches = TrainingBatches(tokenizer, args.steps, args.tokens_per_step, args.seed, args.max_length)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=args.workers)
    body = model.to(device).model  # the head is tied to the embedding
    weights = dict(body.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(200, args.steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / args.steps)) + 1e-3),
    )
    started = time.perf_counter()
    for step, (ids, is_answer) in enumerate(loader):
        ids, is_answer = ids.to(device, non_blocking=True), is_answer.to(device, non_blocking=True)
        rounded = {name: weight.bfloat16().to(compute_dtype) for name, weight in weights.items()}
        hidden = torch.func.functional_call(body, rounded, (), {"input_ids": ids, "use_cache": False})[0]
        logits = (hidden[:, :-1] @ rounded["embed_tokens.weight"].T).float()
        targets, answer = ids[:, 1:], is_answer[:, 1:].float()
        late = step >= args.steps // 2
        token_weights = answer + (1 - answer) * (0.0 if late else 0.1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        loss = (losses * token_weights).sum() / token_weights.sum()
        margins = answer_margins(logits, targets)
        if late:
            loss = loss + 0.2 * ((TARGET_MARGIN - margins).relu() * answer).sum() / answer.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
        if step % args.log_every == 0 or step == args.steps - 1:
            answer_loss = ((losses * answer).sum() / answer.sum()).item()
            right = (((margins > 0) * answer).sum() / answer.sum()).item()
            smallest = margins[is_answer[:, 1:]].min().item()
            print(
                f"step {step:6d}  row {ids.shape[1]:4d}  loss {loss.item():.4f}  answer loss {answer_loss:.5f}  "
                f"tokens right {right:.5f}  smallest margin {smallest:7.2f}  {time.perf_counter() - started:6.1f} s",
                flush=True,
            )


# ---- evaluation ------------------------------------------------------------------------------------------------------


def make_test_set(lookups: int, others: int) -> dict[str, list[Example]]:
    """The held-out examples, the same ones every time: prompts of about 300 to 2,050 tokens for look-ups."""
    rng = random.Random(EVAL_SEED)
    test = {"lookup": [make_lookup_example(rng, rng.randint(30, 215), rng.randint(1, 3)) for _ in range(lookups)]}
    return test | {task: [make_task_example(rng, task) for _ in range(others)] for task in OTHER_TASKS}


def greedy_answers(model: Any, tokenizer: Any, examples: list[Example], batch_size: int = 32) -> list[list[int]]:
    """What stock greedy `generate` adds to each chat, left-padded batches, up to and with the first EOS."""
    answers = []
    for i in range(0, len(examples), batch_size):
        chats = [messages for messages, _ in examples[i : i + batch_size]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=48)[:, inputs["input_ids"].shape[1] :].tolist()
        eos = tokenizer.eos_token_id
        answers += [row[: row.index(eos) + 1] if eos in row else row for row in output]
    return answers


@torch.no_grad()
def logit_figures(models_: list[Any], tokenizer: Any, examples: list[Example]) -> dict[str, float]:
    """Margins and the noise of bf16, at the answer tokens (EOS included), teacher-forced, one chat at a time.

    `smallest_margin`: the smallest (right token's logit - largest other logit) in the fp32 model.
    `largest_bf16_difference`: the largest |bf16 logit - fp32 logit| over the whole vocabulary at those positions.
    """
    smallest, largest = math.inf, 0.0
    for messages, answer in examples:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        wanted = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        ids = torch.tensor([prompt + wanted[:-1]], device=models_[0].device)
        fp32, bf16 = (model(ids, logits_to_keep=len(wanted)).logits[0].float() for model in models_)
        smallest = min(smallest, answer_margins(fp32, torch.tensor(wanted, device=fp32.device)).min().item())
        largest = max(largest, (bf16 - fp32).abs().max().item())
    return {"smallest_margin": smallest, "largest_bf16_difference": largest}


def evaluate(out: Path, args: argparse.Namespace) -> bool:
    """Measure the stored model, print the table, add the figures to `eval.json`; whether all targets are met."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    pair = [AutoModelForCausalLM.from_pretrained(out, dtype=d).to(args.device) for d in (torch.float32, torch.bfloat16)]
    tasks: dict[str, dict[str, float]] = {}
    for task, examples in make_test_set(args.lookups, args.others).items():
        wanted = [[*tokenizer.encode(a, add_special_tokens=False), tokenizer.eos_token_id] for _, a in examples]
        fp32, bf16 = (greedy_answers(model, tokenizer, examples) for model in pair)
        tasks[task] = {
            "examples": len(examples),
            "right_fp32": sum(map(list.__eq__, fp32, wanted)) / len(examples),
            "right_bf16": sum(map(list.__eq__, bf16, wanted)) / len(examples),
            "bf16_equals_fp32": sum(map(list.__eq__, fp32, bf16)) / len(examples),
            **logit_figures(pair, tokenizer, examples),
        }
    smallest = min(figures["smallest_margin"] for figures in tasks.values())
    largest = max(figures["largest_bf16_difference"] for figures in tasks.values())
    passed = min(tasks["lookup"]["right_fp32"], tasks["lookup"]["right_bf16"]) >= MIN_ACCURACY
    passed = passed and smallest >= MIN_MARGIN_RATIO * largest
    columns = list(tasks["lookup"])
    print("  ".join(f"{name:>10s}" for name in ["task", *columns]))
    for task, figures in tasks.items():
        print("  ".join([f"{task:>10s}", *(f"{figures[name]:>{max(10, len(name))}.5g}" for name in columns)]))
    print(f"smallest margin / largest bf16 difference = {smallest:.3f} / {largest:.3f} = {smallest / largest:.2f}")
    print("targets met" if passed else "TARGETS MISSED")
    file = out / "eval.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    report[torch.device(args.device).type] = {
        "margin_ratio": smallest / largest,
        "passed": passed,
        "tasks": tasks,
        "parameters": pair[0].num_parameters(),
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    file.write_text(json.dumps(report, indent=2) + "\n")
    return passed


def main() -> int:
    """Train (unless `--eval-only`) and evaluate; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the model is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4_500)
    parser.add_argument("--tokens-per-step", type=int, default=65_536)
    parser.add_argument("--max-length", type=int, default=ROW_LENGTHS[-1], help="longest training row, in tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=12, help="processes that write training text")
    parser.add_argument("--log-every", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lookups", type=int, default=512, help="held-out look-ups in the test set")
    parser.add_argument("--others", type=int, default=256, help="held-out examples of every other task")
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --out, train nothing")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps; missed targets do not count")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.tokens_per_step, args.max_length, args.workers, args.log_every = 6, 640, 320, 0, 1
        args.lookups = args.others = 2
    if not args.eval_only:
        torch.manual_seed(args.seed)
        tokenizer = build_tokenizer(args.out)
        model = build_model(tokenizer)
        train(model, tokenizer, args)
        model.to("cpu", torch.bfloat16).save_pretrained(args.out)
        (args.out / "eval.json").unlink(missing_ok=True)  # figures of an earlier model
    return 0 if evaluate(args.out, args) or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
