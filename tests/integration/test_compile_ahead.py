"""An engine finds on the disk what `hf-paged compile` has compiled on a machine without a GPU.

In processes of their own, where Triton compiles for a GPU that is not there (`compile_ahead_script.py`).
"""

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
from hf_paged.cli import main

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")


def outcome(folder, *, is_real):
    """What the script prints of a small model with two layers of plain heads."""
    config = Qwen3Config(vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, num_hidden_layers=2, max_position_embeddings=2048)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    script, root = Path(__file__).with_name("compile_ahead_script.py"), Path(hf_paged.__file__).parent.parent
    tests = script.parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), str(tests), str(tests / "runner"), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script, str(folder / "model"), str(is_real)], env=environment,
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"]["status"] == 0, done.stderr
    return found["compiled"], found["served"], done.stdout


def test_an_engine_needs_no_key_that_was_not_compiled(tmp_path):
    """Triton's keys: of shapes, alignments, constants, options and target. The manifest is that of the engine."""
    compiled, served, _ = outcome(tmp_path, is_real=False)
    ahead, needed = compiled["keys"], served["keys"]
    assert not sorted(name for key, name in needed.items() if key not in ahead)
    assert len(needed) > 20 and {"_decode_kernel", "_prefill_kernel", "_grouped_kernel"} <= {*needed.values()}
    assert served["known"] > 20


@pytest.mark.slow
def test_an_engine_finds_every_kernel_on_the_disk(tmp_path):
    _, served, said = outcome(tmp_path, is_real=True)
    compiled, loaded = served["counts"]
    assert compiled == 0 and loaded > 20
    assert served["known"] > 20 and served["missing"] == 0
    assert " kernels compiled, " in said and "not covered: adapters" in said


@pytest.mark.parametrize(("arguments", "message"), [
    (["--sm", "75"], "expected one of 80, 86, 89, 90, 100, 120"),
    (["--sm", "90"], "TRITON_INTERPRET"),
    (["--sm", "90", "--set", "block_size=0"], "block_size"),
])
def test_what_cannot_be_compiled_is_said(tmp_path, capsys, arguments, message):
    assert main(["compile", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_quantized_model_is_refused(tmp_path, monkeypatch):
    from hf_paged.integration import compile_ahead as module
    from hf_paged.kernels.build.absent_gpu import gpu_model

    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(module.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="no quantized weights"):
        module.compile_ahead(str(tmp_path), hf_paged.PagedConfig(), gpu_model(90))
