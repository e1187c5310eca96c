"""A process without a GPU compiles all kernels that an engine on this GPU needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

COMPILE = "import sys; from hf_paged.cli import main; sys.exit(main(sys.argv[1:]))"
SERVE = """
import json, sys
import hf_paged
from hf_paged.kernels.build import kernel_log

with hf_paged.PagedGenerator.from_pretrained(sys.argv[1], warmup=json.loads(sys.argv[2]), max_num_seqs=16,
                                             num_blocks=2048) as generator:
    if generator.engine.needs_warm_up:
        generator.warm_up()
    ready = kernel_log.counts()
    prompts = [[5, 6, 7 + i] * (1 + 20 * i) for i in range(16)] + [[9] * 1500]
    generator.generate(prompts, max_new_tokens=12, use_tqdm=False)
    generator.generate(prompts[:1], max_new_tokens=12, use_tqdm=False)
    generator.generate([[4] * 1000 + [i] for i in range(16)], max_new_tokens=12, use_tqdm=False)
    generator.generate(prompts, max_new_tokens=12, use_tqdm=False, do_sample=True, presence_penalty=0.5,
                       repetition_penalty=1.1, logprobs="raw")
print(json.dumps({"ready": ready, "end": kernel_log.counts()}))
"""


def test_an_engine_compiles_nothing(tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=512, hidden_size=1024, intermediate_size=1536, num_hidden_layers=3, head_dim=128,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(model := str(tmp_path / "model"))
    paths = [str(Path(hf_paged.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    major, minor = torch.cuda.get_device_capability()
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def run(script, *arguments, **changes):
        done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], env=environment | changes,
                              capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    run(COMPILE, "compile", model, "--sm", 10 * major + minor, "--sms", sms, "--set", "max_num_seqs=16",
        CUDA_VISIBLE_DEVICES="")
    for warmup in ('"full"', "true"):
        found = json.loads(run(SERVE, model, warmup)[-1])
        assert found["ready"][0] == found["end"][0] == 0 < found["end"][1], (warmup, found)
