"""On 2, 4 and 8 GPUs: tokens of the trained model in bf16, and of random ones in fp32, as on one; LoRA on experts, and
images; CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys

import peft
import pytest
import torch
from family_models import family_model
from image_processors import image, model_of, processor, stock_answer, user
from lora_models import randomize, with_adapter, with_expert_adapter
from support import lookup_chat, lookup_facts, random_prompts, tiny_model
from transformers import AutoModelForCausalLM

from hf_paged import PagedGenerator
from hf_paged.models.experts import ExpertsParts
from hf_paged.parallel.group import group_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
VOCAB = 5000
PROMPTS = random_prompts([5, 17, 40, 33, 9, 21, 1, 60, 16, 48] * 3, vocab_size=VOCAB)
SAMPLED = {"do_sample": True, "temperature": 1.2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8,
             "num_key_value_heads": 2}
    tiny_model(vocab_size=VOCAB, **shape).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=[2, 4, 8])
def size(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("paged", [
    {}, {"all_reduce": "nccl"}, {"enforce_eager": True}, {"overlap": False},
    {"num_blocks": 30, "max_num_batched_tokens": 256},
])
def test_random_models_in_fp32_give_the_tokens_of_one_gpu(checkpoint, paged, size):
    torch.backends.cuda.matmul.allow_tf32 = False
    filtered = {**SAMPLED, "top_k": 30, "top_p": 0.9}
    calls = [{}, SAMPLED, filtered, {"repetition_penalty": 1.3}, {**SAMPLED, "min_p": 0.05}]
    with PagedGenerator.from_pretrained(checkpoint, **paged) as alone:
        expected = [ids(alone.generate(PROMPTS, max_new_tokens=40, seed=1, **options)) for options in calls]
    with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=size, **paged) as sharded:
        for options, tokens in zip(calls, expected, strict=True):
            made = ids(sharded.generate(PROMPTS, max_new_tokens=40, seed=1, **options))
            # Sums over ranks round otherwise: a draw that was near a tie may fall on the other side.
            assert sum(a == b for a, b in zip(made, tokens, strict=True)) >= len(PROMPTS) - (2 if options else 0)
        stats = sharded.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks - 1
        # Also in a process that has held models over ranks before, with larger buffers, over another number of them.
        assert (group_of(sharded.model).peers is None) == (paged.get("all_reduce") == "nccl")
        assert (stats.num_graphs_captured > 0) == (not paged.get("enforce_eager", False))


def test_the_trained_model_in_bf16_gives_the_answers(trained_path, trained_tokenizer, size):
    tables = [lookup_facts(count, seed=count) for count in (3, 20, 45, 90)]
    questions = [(table, name) for table in tables for name in list(table)[:: max(1, len(table) // 4)]]
    chats = [lookup_chat(*question) for question in questions]
    with PagedGenerator.from_pretrained(trained_path, dtype=torch.bfloat16, tensor_parallel_size=size,
                                        tokenizer=trained_tokenizer) as generator:
        for _ in range(2):
            made = generator.generate(chats, max_new_tokens=24)
            assert [c.text for c in made] == [f"{name}: {table[name]}" for table, name in questions]


def test_generators_of_one_process_come_and_go(checkpoint):
    """With larger buffers and with smaller ones they all meet fresh workers, and none leaves memory on their GPUs."""
    free = []
    for tokens in (65536, 256, 65536, 256):
        with PagedGenerator.from_pretrained(checkpoint, tensor_parallel_size=2, max_num_batched_tokens=tokens,
                                            num_blocks=500, all_reduce="peers") as generator:
            generator.generate(PROMPTS[:2], max_new_tokens=2)
        free.append(torch.cuda.mem_get_info(1)[0])
    assert free[3] > free[0] - (32 << 20)


SCRIPT = """
import faulthandler, os, signal, sys, threading, time
faulthandler.dump_traceback_later(100, exit=True)
from transformers import AutoModelForCausalLM

from hf_paged import PagedGenerator
from hf_paged.errors import WorkerDiedError
folder, all_reduce, how = sys.argv[1:]
generator = PagedGenerator.from_pretrained(folder, tensor_parallel_size=2, all_reduce=all_reduce)
before = [c.token_ids for c in generator.generate([[5, 6, 7]] * 8, max_new_tokens=50, use_tqdm=False)]
[process] = generator._workers[0].processes
target = (process, signal.SIGKILL) if how == "killed" else (os.getpid(), signal.SIGINT)
threading.Timer(0.5, os.kill, target).start()
begin = time.monotonic()
try:
    while True:
        generator.generate([[5, 6, 7]] * 8, max_new_tokens=400, use_tqdm=False)
except (WorkerDiedError, KeyboardInterrupt) as error:
    print("ENDED", round(time.monotonic() - begin - 0.5, 2), repr(error)[:200], flush=True)
    print("LEFT", os.path.exists(f"/proc/{process}"), sys.modules["torch"].distributed.is_initialized(), flush=True)
if how == "interrupt":
    again = [c.token_ids for c in generator.generate([[5, 6, 7]] * 8, max_new_tokens=50, use_tqdm=False)]
    stats = generator.engine.stats()
    print("AGAIN", again == before, stats.num_free_blocks == stats.num_blocks - 1, flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "interrupt"])
@pytest.mark.parametrize("all_reduce", ["nccl", "peers"])
def test_a_killed_worker_or_ctrl_c_does_not_leave_the_gpu_waiting(checkpoint, tmp_path, all_reduce, how):
    """Kernels that wait for a dead peer, in the middle of a graph, give up: one error, and the script ends as it likes.
    After Ctrl-C the generator goes on."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    try:
        made = subprocess.run([sys.executable, str(script), checkpoint, all_reduce, how], capture_output=True,
                              text=True, timeout=120,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    except subprocess.TimeoutExpired as hung:
        said = [(text or b"").decode(errors="replace") for text in (hung.stdout, hung.stderr)]
        pytest.fail(f"not over after {hung.timeout} s:\n{said[0]}{said[1][-5000:]}")
    words = ("ENDED", "LEFT", *(("AGAIN",) if how == "interrupt" else ()))
    said = {line.split()[0]: line for line in made.stdout.splitlines() if line.startswith(words)}
    assert set(said) == set(words), made.stdout + made.stderr[-3000:]
    # Communicators that do not end would take `launch._ABORT`, 4 seconds, and the interpreter with them.
    assert float(said["ENDED"].split()[1]) < 3.0
    assert ("SIGKILL" if how == "killed" else "KeyboardInterrupt") in said["ENDED"]
    assert said["LEFT"] == ("LEFT True True" if how == "interrupt" else "LEFT False False")
    assert said.get("AGAIN", "AGAIN True True") == "AGAIN True True"
    assert made.returncode == 0, made.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_adapters_by_name(checkpoint, tmp_path, size, dtype):
    """Written from rank 0's GPU and read back, bit for bit, under graphs that were captured before; rows under LoRA."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with_adapter(AutoModelForCausalLM.from_pretrained(checkpoint), "red", 1).save_pretrained(tmp_path)
    with PagedGenerator.from_pretrained(checkpoint, dtype=dtype) as alone:
        old = dict(alone.named_weights())
        noise = torch.Generator().manual_seed(3)
        new = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise).to(dtype)
               for name, tensor in old.items()}
        expected = [ids(alone.generate(PROMPTS, max_new_tokens=20))]
        alone.load_weights(new)
        expected.append(ids(alone.generate(PROMPTS, max_new_tokens=20)))
        alone.load_adapter("red", tmp_path / "red")
        names = [None, "red", "__base__"] * (len(PROMPTS) // 3)
        expected.append(ids(alone.generate(PROMPTS, max_new_tokens=20, adapter_names=names)))
    with PagedGenerator.from_pretrained(checkpoint, dtype=dtype, tensor_parallel_size=size) as sharded:
        made = [ids(sharded.generate(PROMPTS, max_new_tokens=20))]
        sharded.load_weights((name, tensor.cuda()) for name, tensor in new.items())
        found = dict(sharded.named_weights())
        assert found.keys() == new.keys() and all(torch.equal(found[name], new[name]) for name in new)
        made.append(ids(sharded.generate(PROMPTS, max_new_tokens=20)))
        sharded.load_adapter("red", tmp_path / "red")
        made.append(ids(sharded.generate(PROMPTS, max_new_tokens=20, adapter_names=names)))
    assert len({str(tokens) for tokens in expected}) == 3
    if dtype == torch.float32:  # in bf16 sums over ranks may turn a near tie
        assert made == expected


TORCHRUN = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(100, exit=True)
import torch
import hf_paged
from transformers import AutoModelForCausalLM

from hf_paged import PagedGenerator
from hf_paged.parallel.group import join
from hf_paged.parallel.loading import load
folder, how, *prompt = sys.argv[1:]
prompt, rank = [int(word) for word in prompt], int(os.environ["RANK"])
if how == "generator":
    generator = PagedGenerator.from_pretrained(folder, tensor_parallel_size=2)
    made = generator.generate([prompt], max_new_tokens=20, use_tqdm=False)
    engine, tokens = generator.engine, made and made[0].token_ids
else:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = hf_paged.enable(load(folder, join(rank, 2, device), device=device))
    ids = torch.tensor([prompt], device=device)
    engine = hf_paged.get_engine(model)
    tokens = model.generate(ids, max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
assert engine.stats().num_graphs_captured > 0
print("TOKENS", rank, tokens, flush=True)
if how != "model, nothing destroyed":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["generator", "model", "model, nothing destroyed"])
def test_torchrun_ends_although_graphs_hold_collectives(checkpoint, tmp_path, how):
    """NCCL's communicators wait for such graphs, and nobody closes a generator or disables a model before the end."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with PagedGenerator.from_pretrained(checkpoint) as alone:
        [expected] = ids(alone.generate(PROMPTS[:1], max_new_tokens=20))
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    made = subprocess.run([*command, checkpoint, how, *map(str, PROMPTS[0])], capture_output=True, text=True,
                          timeout=150,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert made.returncode == 0, made.stdout + made.stderr[-5000:]
    told = {f"TOKENS 0 {expected}", f"TOKENS 1 {None if how == 'generator' else expected}"}
    assert told <= set(made.stdout.splitlines())


def scores_of(model, completions):
    """What a stock model gives the prompts and tokens of completions, and what was given with them."""
    stock, given = [], []
    for one in completions:
        tokens = torch.tensor([one.prompt_token_ids + one.token_ids], device=model.device)
        with torch.no_grad():
            known = model(tokens).logits[0, :-1].float().log_softmax(-1)
        stock.append(known.gather(1, tokens[0, 1:, None])[:, 0].cpu())
        given.append(torch.tensor([*one.prompt_logprobs[1:], *one.logprobs]))
    return torch.cat(stock), torch.cat(given)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_lora_on_experts(tmp_path, size, name, monkeypatch):
    """In kernels, which fold each rank's part; of two adapters, switched and trained between calls, in graphs.

    In bf16 sums over ranks move a log-probability by far less than another adapter does.
    """
    seen, products = set(), ExpertsParts.products
    monkeypatch.setattr(ExpertsParts, "products",
                        lambda self, hidden, routes: seen.add(len(hidden)) or products(self, hidden, routes))
    shape = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 128,
             "moe_intermediate_size": 128}
    model = family_model(name, **shape).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    wrapped = with_expert_adapter(with_expert_adapter(model, "red", scale=0.2), "blue", 6, r=3, scale=0.2)
    wrapped.save_pretrained(tmp_path)
    wrapped, prompts, before = wrapped.cuda(), random_prompts([33, 70, 7]), None
    with PagedGenerator.from_pretrained(tmp_path / "base", tensor_parallel_size=size) as sharded:
        for adapter in ("red", "blue"):
            sharded.load_adapter(adapter, tmp_path / adapter)
        for adapter in ("red", "blue", "trained", "red"):
            if adapter == "trained":
                randomize(wrapped, "blue", 9, 0.2)
                trained = peft.get_peft_model_state_dict(wrapped, adapter_name="blue")
                names = (f"{key.removeprefix('base_model.model.').removesuffix('.weight')}.blue.weight"
                         for key in trained)
                sharded.load_weights(dict(zip(names, trained.values(), strict=True)), partial=True)
            else:
                wrapped.set_adapter(adapter)
                sharded.set_adapter(adapter)
            for _ in range(2):
                made = sharded.generate(prompts, max_new_tokens=24, logprobs=True, prompt_logprobs=True)
                stock, given = scores_of(wrapped, made)
                error = (stock - given).abs().mean()
            if before is not None:  # the completions of the last adapter, by this one
                stock, given = scores_of(wrapped, before)
                assert error < 0.2 * (stock - given).abs().mean()
            before = made
        assert sharded.engine.stats().num_graphs_captured > 0
    assert seen & {3, 4}, seen


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3"])
def test_chats_with_images(tmp_path, name):
    """Rank 0's vectors on each GPU; decode steps in graphs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    made = processor(name)
    model = model_of(made, name)
    model.save_pretrained(tmp_path)
    chats = [[user("what is ", image(1), "?")], [user("what is ", image(3), "?")],
             [user(image(1), " or ", image(2, 16, 24), "?")]]
    expected = [stock_answer(model, made, chat, max_new_tokens=12)[1] for chat in chats]
    assert expected[0] != expected[1]
    with PagedGenerator.from_pretrained(tmp_path, tensor_parallel_size=2, tokenizer=made) as sharded:
        for _ in range(3):
            assert ids(sharded.generate(chats, max_new_tokens=12)) == expected
        assert sharded.engine.stats().num_graphs_captured > 0
