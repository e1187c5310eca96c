"""Train while rollouts run: a thread updates the weights of the model object that generates.

    python examples/async_rollouts.py

Runs on a CPU in some seconds. Rollouts under way go on over an update: they keep their keys and values
(``on_weight_change="keep"``, as PipelineRL does), and each token says which weights made it
(`Completion.weight_versions`). What is under way at the end is ended and goes on later. See
docs/reinforcement_learning.md.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_paged import Completion, PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}
TEMPERATURE, IN_FLIGHT, BATCH, UPDATES, NUM_SHOWN = 1.5, 8, 6, 4, 5


def chat(name: str) -> list[dict[str, str]]:
    table = "Codes:\n" + "\n".join(f"{known}: {code}" for known, code in FACTS.items())
    return [{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {name}?"}]


def policy_loss(model: torch.nn.Module, rollouts: list[tuple[str, Completion]]) -> torch.Tensor:
    """REINFORCE with a clipped ratio: tokens may be of older weights, and their log-probabilities are those of then."""
    rewards = torch.tensor([float(str(FACTS[name]) in (made.text or "")) for name, made in rollouts])
    losses = []
    for advantage, (_, made) in zip(rewards - rewards.mean(), rollouts, strict=True):
        ids = torch.tensor([made.prompt_token_ids + made.token_ids])
        logits = model(input_ids=ids).logits[0, len(made.prompt_token_ids) - 1 : -1] / TEMPERATURE
        now = logits.log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        ratio = (now - torch.tensor(made.logprobs)).exp().clamp(0.5, 2.0)
        losses.append(-(advantage * ratio).mean())
    return torch.stack(losses).mean()


def main() -> tuple[list[Completion], list[Completion]]:
    """All rollouts; and those that were ended half-way, once they went on to their ends."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    config = GenerationConfig(max_new_tokens=24, do_sample=True, temperature=TEMPERATURE, top_k=0,
                              eos_token_id=tokenizer.eos_token_id)
    prompts = {name: tokenizer.apply_chat_template(chat(name), add_generation_prompt=True, return_dict=False)
               for name in FACTS}
    finished: queue.Queue[tuple[str, Completion]] = queue.Queue()

    with PagedGenerator(model, tokenizer, on_weight_change="keep") as generator:
        engine = generator.engine

        def train() -> None:
            for number in range(UPDATES):
                rollouts = [finished.get() for _ in range(BATCH)]
                policy_loss(model, rollouts).backward()  # beside the steps of the engine, which only read
                with engine.weight_update():  # between two of them
                    optimizer.step()
                optimizer.zero_grad()
                versions = {version for _, made in rollouts for version in made.weight_versions}
                print(f"update {number + 1}, from tokens of versions {sorted(versions)}, comes to {len(asked)} "
                      "rollouts under way")

        trainer = threading.Thread(target=train)
        trainer.start()
        names = itertools.cycle(FACTS)
        asked: dict[str, str] = {}  # name of each open request

        def ask() -> None:
            name = next(names)
            asked[engine.add_request(prompts[name], config, logprobs="processed")] = name

        def step() -> list[tuple[str, Completion]]:
            ended = [output for output in engine.step() if output.completion is not None]
            return [(asked.pop(output.request_id), output.completion) for output in ended]

        rollouts = []
        while trainer.is_alive():
            if finished.qsize() >= BATCH:  # training is behind: rollouts stand still, and go on with newer weights
                time.sleep(0.001)
                continue
            if len(asked) < IN_FLIGHT:  # one a step, so that they are not all at their ends at the same time
                ask()
            for one in step():
                rollouts.append(one[1])
                finished.put(one)

        while len(asked) < IN_FLIGHT:
            ask()
        rollouts += [made for _ in range(3) for _, made in step()]
        for request_id in asked:  # they keep their tokens, log-probabilities, versions and random numbers
            engine.abort(request_id)
        aborted = [made for _, made in step()]
        resumed = generator.generate(aborted, config, logprobs="processed")
        mixed = [made for made in rollouts if len(set(made.weight_versions)) > 1]
        print(f"{len(rollouts)} rollouts, {len(mixed)} of them over more than one version of the weights:")
        for made in mixed[:NUM_SHOWN]:
            print(f"  {made.text!r:24} weight_versions={made.weight_versions}")
        print(f"{len(aborted)} ended after {[len(one.token_ids) for one in aborted]} tokens and went on to "
              f"{[len(one.token_ids) for one in resumed]}")
    return rollouts, resumed


if __name__ == "__main__":
    main()
