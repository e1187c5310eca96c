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
from recurrent_models import CLASSES, CORE, with_idiom
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_paged
from hf_paged.cli import main

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")


def run_script(folder, model, *families, is_real=False):
    script, root = Path(__file__).with_name("compile_ahead_script.py"), Path(hf_paged.__file__).parent.parent
    tests = script.parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), str(tests), str(tests / "runner"), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script, str(model), str(is_real), *families], env=environment,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, one in found.items():
        assert one["compiled"]["status"] == 0 and one["compiled"]["asked"] == [], (name, done.stderr)
    return found, done.stdout


def outcome(folder, *, is_real):
    """What the script prints of a small model with two layers of plain heads."""
    config = Qwen3Config(vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, num_hidden_layers=2, max_position_embeddings=2048)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    found, said = run_script(folder, folder / "model", is_real=is_real)
    return found["model"]["compiled"], found["model"]["served"], said


def missed(one):
    """Kernels that requests need by keys that were not compiled."""
    return sorted(name for key, name in one["served"]["keys"].items() if key not in one["compiled"]["keys"])


def test_an_engine_needs_no_key_that_was_not_compiled(tmp_path):
    """Triton's keys: of shapes, alignments, constants, options and target. The manifest is that of the engine."""
    compiled, served, _ = outcome(tmp_path, is_real=False)
    needed = served["keys"]
    assert missed({"compiled": compiled, "served": served}) == []
    assert len(needed) > 20 and {"_decode_kernel", "_prefill_kernel", "_grouped_kernel"} <= {*needed.values()}
    assert served["known"] > 20


PACKED = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "Mamba2", "NemotronH", "Bamba", "GraniteMoeHybrid")
OTHER_STATES = sorted({*CLASSES} - {*CORE, "LaraMini", "Lfm3"})


@with_idiom
@pytest.mark.parametrize("families", [
    ("Qwen3_5", "Lfm2", "NemotronH"), pytest.param(("Qwen3Next", "Mamba2", "Bamba"), marks=pytest.mark.slow),
    pytest.param(OTHER_STATES, marks=pytest.mark.slow, id="others")], ids="-".join)
def test_models_with_states_need_no_key_that_was_not_compiled(families, tmp_path):
    """States once took their share of the memory that an absent GPU had free, and prompts one by one were not looked
    at. The engine's GPU has less memory than the one compiled for."""
    found, _ = run_script(tmp_path, tmp_path, *families)
    assert [*found] == [*families]
    for name, one in found.items():
        assert missed(one) == [], name
        needed = {*one["served"]["keys"].values()}
        assert one["served"]["known"] > 8, "the engine's manifest is not the one that was written"
        assert ("_packed_convolution_kernel" in needed) == (name in PACKED)
        assert ("_scan_kernel" in needed) == (name in PACKED and not name.startswith("Qwen"))


@pytest.mark.slow
def test_images_need_no_key_that_was_not_compiled(tmp_path):
    found, _ = run_script(tmp_path, tmp_path, "qwen2.5-vl", "glm4v")
    for one in found.values():
        seen = one["seen"]["keys"]
        assert {*seen.values()} == {"_windowed_kernel"} and {*seen} <= {*one["compiled"]["keys"]}


@pytest.mark.slow
def test_no_family_asks_a_gpu_that_is_not_there(tmp_path):
    """Whatever `torch.cuda` does not answer by the description of the target fails."""
    families = "llama", "gemma2", "gpt-oss", "qwen3-moe", "phi3", "mistral"
    found, _ = run_script(tmp_path, tmp_path, *families)
    assert all("_decode_kernel" in one["compiled"]["keys"].values() for one in found.values())


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
