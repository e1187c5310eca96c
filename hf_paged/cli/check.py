"""`hf-paged check MODEL`: report what of a model would run natively, why not, and what fits into memory.

Nothing is generated and no weights are read: the model is built from its config with memory that is never touched, so
that the report takes seconds for a checkpoint of any size. A quantized model is loaded: only then are its layers known.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from hf_paged.config import read_pairs

# Usual calls, which are reported besides the given one.
_CALLS: dict[str, dict[str, Any]] = {
    "greedy search": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "with scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def add_parser(commands: Any) -> None:
    """Add the arguments of ``check``."""
    parser = commands.add_parser("check", help="what of a model would run natively, why not, and what fits into memory",
                                 description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with at least a config.json, or a model id")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto: as the config says")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; left out: CUDA where there is a GPU")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of PagedConfig")
    parser.add_argument("--generate", nargs="*", default=[], metavar="NAME=VALUE",
                        help="a call to look at besides the usual ones: arguments of model.generate")
    parser.add_argument("--load", action="store_true", help="read the weights, too")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 0 if a plain `generate` would be native, else 1."""
    from hf_paged.integration.preview import preview

    calls = dict(_CALLS)
    if arguments.generate:
        calls["as asked"] = read_pairs(arguments.generate)
    report = preview(arguments.model, calls, dtype=arguments.dtype, device=arguments.device, load=arguments.load,
                     trust_remote_code=arguments.trust_remote_code, overrides=read_pairs(arguments.set))
    found = dataclasses.asdict(report)
    print(json.dumps(found, indent=2) if arguments.json else report)
    return int(report.calls["greedy search"].path != "native")
