"""A second process of a model compiles nothing, also for rare options, and makes the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SCRIPT = """
import json
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
import hf_paged

torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                     max_position_embeddings=2048)).to("cuda", torch.bfloat16).eval()
with hf_paged.PagedGenerator(model, warmup="full", one_launch=False, max_num_seqs=16, num_blocks=512) as generator:
    generator.warm_up()
    before = generator.engine.stats()
    options = {"max_new_tokens": 12, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": "raw"}
    made = generator.generate([[5, 6, 7 + i] for i in range(5)], **options)
    after = generator.engine.stats()
print(json.dumps({"compiled": after.num_kernels_compiled, "loaded": after.num_kernels_loaded, "in service": [
    after.num_kernels_compiled - before.num_kernels_compiled, after.num_kernels_loaded - before.num_kernels_loaded],
    "waited": after.compile_wait_seconds, "tokens": [one.token_ids for one in made]}))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    def run(policy):
        paths = [str(Path(hf_paged.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "HF_PAGED_AFTER_READY": policy,
                                    "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True,
                              timeout=280)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first = run("warn")
    assert first["compiled"] > 0
    file, = (tmp_path / "hf_paged").iterdir()
    assert json.loads(file.read_text())["variants"]
    second = run("error")
    assert second["compiled"] == 0 < second["loaded"] and second["in service"] == [0, 0]
    assert second["waited"] == 0.0 and second["tokens"] == first["tokens"]
