"""What `hf-paged check` says of layers with a recurrent state: by kernels, or why by transformers' modules."""

from __future__ import annotations

import pytest
from recurrent_models import outlined, recurrent_model, with_idiom

from hf_paged.integration import explain
from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.derivation.executor import OUTLINES


@with_idiom
@pytest.mark.parametrize("has_kernels", [False, True])
def test_why_modules_compute_states(tmp_path, monkeypatch, has_kernels):
    model = outlined(recurrent_model("Qwen3_5"))
    OUTLINES[model] = OUTLINES[model]._replace(max_step_tokens=2048)
    model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(explain, "model_of_config", lambda *args: model)
    if has_kernels:
        monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    preview = explain.preview(str(tmp_path), {}, device="cpu")
    lines = [line for line in str(preview).splitlines() if line.startswith("states ")]
    assert bool(lines) is not has_kernels
    assert has_kernels or "by transformers' modules: layers.0.linear_attn: the kernels need Triton" in lines[0]
    assert preview.memory.kv_cache > 0 and preview.memory.total is None
    assert explain.preview(str(tmp_path), {}, device="cpu", overrides={"fused_kernels": False}).states is not None
