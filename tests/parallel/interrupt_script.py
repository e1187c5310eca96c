"""A user who presses Ctrl-C again and again while a generator over two ranks works: one process, one set of ranks.

    python interrupt_script.py CHECKPOINT OVERLAP

OVERLAP: 1 where steps are launched before the last one is committed, as on a GPU, else 0. A thread sends this process a
real SIGINT at a random time of a call, in some rounds two. Prints in how many rounds calls of each kind were
interrupted; an assertion or a hang ends it with another exit code.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time

import torch
from support import random_prompts
from transformers import GenerationConfig

from hf_paged import PagedGenerator

ROUNDS, WATCHDOG_S = 20, 240
VOCAB = 2600
PROMPTS = random_prompts([5, 17, 40, 33, 9, 21], vocab_size=VOCAB)
LENGTH = 24


def ids(completions):
    return [completion.token_ids for completion in completions]


def generated(generator):
    return ids(generator.generate(PROMPTS[:4], max_new_tokens=LENGTH))


def streamed(generator):
    made = [[] for _ in PROMPTS[:4]]
    for index, output in generator.stream(PROMPTS[:4], max_new_tokens=LENGTH):
        made[index] += output.new_token_ids
    return made


def stepped(generator):
    engine, made = generator.engine, {}
    asked = [engine.add_request(prompt, GenerationConfig(max_new_tokens=LENGTH)) for prompt in PROMPTS[:4]]
    while engine.has_unfinished():
        made.update((o.request_id, o.completion.token_ids) for o in engine.step() if o.completion)
    return [made[i] for i in asked]


def as_tensors(generator):
    made = generator.generate(input_ids=torch.tensor([PROMPTS[2][:16]]), max_new_tokens=LENGTH)
    return made[0, 16:].tolist()


def updated(generator):
    with generator.engine.weight_update():
        time.sleep(0.02)
    return generated(generator)


def interrupted(work, delay, count):
    """Call `work` again and again, until `count` signals have come, the first after `delay` seconds."""
    def send():
        time.sleep(delay)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2e-4)

    sender, times = threading.Thread(target=send), 0
    try:
        try:
            sender.start()
            while True:
                work()
        except KeyboardInterrupt:
            times += 1
            sender.join()
            time.sleep(0.01)
    except KeyboardInterrupt:
        times += 1
    sender.join()
    return times


def main(checkpoint, overlap):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background may have it ignored
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2, max_num_seqs=6, num_blocks=24,
                                        max_num_batched_tokens=40, overlap=overlap) as generator:
        engine, processes = generator.engine, generator._workers[0].processes
        works = (generated, streamed, stepped, as_tensors, updated)
        expected = {work: work(generator) for work in works}
        for work in works[1:3]:
            assert expected[work] == expected[generated], work
        others_expected = ids(generator.generate(PROMPTS[4:], max_new_tokens=2 * LENGTH))
        begin = time.perf_counter()
        generated(generator)
        duration = time.perf_counter() - begin
        hits = dict.fromkeys((work.__name__ for work in works), 0)
        for seed in range(ROUNDS):
            rng = random.Random(seed)
            work = works[seed % len(works)]
            others = []
            thread = threading.Thread(target=lambda into: into.extend(
                ids(generator.generate(PROMPTS[4:], max_new_tokens=2 * LENGTH))), args=(others,))
            if with_others := bool(rng.getrandbits(1)):
                thread.start()
            wrong = []

            def call(work=work, wrong=wrong):
                wrong += [made for made in [work(generator)] if made != expected[work]]

            hits[work.__name__] += interrupted(call, rng.uniform(0, 2 * duration), 1 + seed % 2) > 0
            if with_others:
                thread.join()
                assert others == others_expected, (seed, "others")
            while engine.has_unfinished():  # of `stepped`: the caller still has these
                engine.step()
            assert not wrong, (seed, work, wrong)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0), (seed, stats)
            assert stats.num_free_blocks == stats.num_blocks - 1, (seed, stats)
            assert work(generator) == expected[work], (seed, work)
            assert generator._workers[0].processes == processes
            assert all(os.path.exists(f"/proc/{process}") for process in processes)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print(hits)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
