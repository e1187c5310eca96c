"""What `hf-paged compile` leaves, and what an engine needs then, on a GPU that is not there; run by
`test_compile_ahead.py`, which looks at what it prints.

    python compile_ahead_script.py MODEL is_real FAMILY ...

MODEL is a folder. Models of families are made here, and run by their outlines. The engine is a process of its own, and
so is the one that compiles. Unless ``is_real``, kernels are told apart by Triton's keys and nothing is compiled.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import service
import torch
from family_models import family_model
from image_calls import image_call
from image_models import MODELS, image_model
from pretended_gpu import compile_nothing, variants
from recurrent_models import CLASSES, PUBLISHED_HEADS, outlined, recurrent_model
from service import Service, nobodys_gpu
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import get_cache_key, make_backend

from hf_paged.cli import main
from hf_paged.config import PagedConfig
from hf_paged.integration import compile_ahead
from hf_paged.kernels.build import absent_gpu, compiling, kernel_log
from hf_paged.models.executor import view_of
from hf_paged.models.images import tower_attention
from hf_paged.runner.recurrent.state_pool import config_for_states
from hf_paged.runner.warm_up import WarmUp
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.log_probs import RAW

ROWS = 8
service.MOST_TOKENS, service.MOST_LENGTH = 512, 2048
SETTINGS = {"max_num_seqs": ROWS, "max_num_batched_tokens": service.MOST_TOKENS, "max_model_len": service.MOST_LENGTH,
            "merge_weights": False, "attention_backend": "triton"}


def keys() -> dict[str, str]:
    """Triton's keys of the variants so far, with their kernels' names."""
    target = GPUTarget("cuda", 90, 32)
    backend, environment = make_backend(target), get_cache_invalidating_env_vars()
    return {get_cache_key(one.source, backend, backend.parse_options(dict(one.options)), environment): one.name
            for one in variants}


def compiled(model: str, is_real: bool) -> dict[str, Any]:
    if not is_real:
        compile_nothing()
    asked, refuse, make = [], absent_gpu._refuse, compile_ahead.model_of_config
    absent_gpu._refuse = lambda name, *args, **options: asked.append(name) or refuse(name)
    if Path(model).name in CLASSES:
        compile_ahead.model_of_config = lambda *args: outlined(make(*args))
    settings = [f"{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    status = main(["compile", model, "--sm", "90", "--set", *settings])
    return {"status": status, "keys": keys(), "asked": asked}


def served(model: str, is_real: bool) -> dict[str, Any]:
    if is_real:
        service.compile_nothing = lambda: None
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval().requires_grad_(False)
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()  # as a GPU aligns it, and not as it lies in the file
    if has_states := Path(model).name in CLASSES:
        outlined(loaded)
    # Modules with states read slots, which kernels that are not launched do not write.
    with nobodys_gpu(), compiling._Zeros() if has_states else nullcontext():
        found = Service(loaded, num_parameters=loaded.num_parameters(), num_blocks=2000,
                        backend=SETTINGS["attention_backend"], most_rows=ROWS)
        executor, config = found.runner.executor, PagedConfig(**SETTINGS)
        if executor.has_states:  # of a GPU with less memory than that of `hf-paged compile`
            config = replace(config_for_states(config, executor.kv_spec(), 1 << 30), max_num_seqs=ROWS - 1)
        warm_up = WarmUp(executor, config)
        warm_up.begin()
        missing = len(warm_up._loading.result())
        prompts = [[i] * (20 + 50 * i) for i in range(1, 9)]
        found.serve("plain", prompts, [4] * 8)
        found.serve("one", prompts[:1], [4])
        found.serve("long", [[3] * 1500], [4])
        found.serve("options", prompts, [4] * 8, edits=Edits(repetition_penalty=1.1), scored=(RAW,))
        found.serve("masks", prompts[:2], [4] * 2, masked=True)
        scheduler = found.scheduler()
        found.serve("prefix", [[5] * 1024], [1], scheduler=scheduler)
        found.serve("behind it", [[5] * 1024 + [i] * 40 for i in range(8)], [4] * 8, scheduler=scheduler)
    return {"keys": keys(), "counts": kernel_log.counts(), "known": len(warm_up.manifest.variants), "missing": missing}


def seen(model: str, is_real: bool) -> dict[str, Any]:
    """The keys of an image's way through the tower."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(model, dtype="auto").eval()
    call = image_call(loaded, [["0", "1"]])
    tower_attention.why_not_attention = lambda name: None  # functions of torch are replaced here
    with nobodys_gpu():
        view = view_of(loaded.model, {})
        tower_attention.TowerAttention().through(view.get_image_features, view)(
            call["pixel_values"].to(loaded.dtype), call["image_grid_thw"])
    return {"keys": keys()}


def made(family: str, folder: Path) -> str:
    """Write a small model of a family, with heads for which there are kernels."""
    if family in MODELS:
        model = image_model(family)
    elif family in CLASSES:
        model = recurrent_model(family, **PUBLISHED_HEADS[family], max_position_embeddings=service.MOST_LENGTH)
    else:
        model = family_model(family, head_dim=64, max_position_embeddings=service.MOST_LENGTH)
    model.to(torch.bfloat16).save_pretrained(folder / family)
    return str(folder / family)


def in_a_process(work: Callable[[str, bool], Any], model: str, is_real: bool) -> Any:
    result = Path(os.environ["TRITON_CACHE_DIR"]) / "result.json"
    if (child := os.fork()) == 0:
        try:
            result.parent.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(work(model, is_real)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, model
    return json.loads(result.read_text())


if __name__ == "__main__":
    folder, is_real, *families = sys.argv[1:]
    models = [made(family, Path(folder)) for family in families] or [folder]
    # Other families would be proved on the GPU that is not there.
    works = {model: (compiled, seen) if Path(model).name in MODELS else (compiled, served) if not families
             or Path(model).name in CLASSES else (compiled,) for model in models}
    print(json.dumps({Path(model).name: {work.__name__: in_a_process(work, model, is_real == "True") for work in done}
                      for model, done in works.items()}))
