"""The server of one model: `hf-paged serve MODEL`, or `python -m hf_paged.serve MODEL`.

This file is imported to parse a command line, so it imports torch and transformers only when a server starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from typing import Any

from hf_paged.config import PagedConfig, read_pairs
from hf_paged.optional import require

_ABOUT = """Serve a model by the OpenAI API (docs/server.md):

  POST /v1/chat/completions   answer a chat, whole or streamed
  POST /v1/completions        continue texts or token ids, whole or streamed
  POST /v1/responses          answer a chat of the Responses API, whole or streamed
  GET  /v1/models             list the names of the model and of its adapters
  GET  /health                say whether requests can be answered
  GET  /metrics               metrics for Prometheus (needs prometheus_client)
"""
_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical")  # of transformers, which is not imported here
_DEFAULTS = {"warmup": "full"}  # of a server, in place of those of PagedConfig
# Flags of `transformers serve` for what a field of PagedConfig says.
_ALIASES = {"block_size": ["--cb-block-size"], "num_blocks": ["--cb-num-blocks"], "seed": ["--default-seed"],
            "max_num_batched_tokens": ["--cb-max-batch-tokens"], "gpu_memory_utilization": ["--cb-max-memory-percent"]}
# Fields of `ImageLimits`.
_IMAGE_LIMITS = {"images": "images that a request may have, as data URLs; 0: none. Left out: 16",
                 "image-bytes": "bytes of a request's images together. Left out: 32 MiB",
                 "image-pixels": "pixels of a request's images together. Left out: 64 Mi"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = _ABOUT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a model id, maybe with @REVISION")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="localhost")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--max-body-bytes", type=count, metavar="N", help="longer get 413. Left out: 64 MiB")
    server.add_argument("--enable-cors", action="store_true", help="let pages of any origin send requests")
    server.add_argument("--log-level", type=str.lower, choices=_LOG_LEVELS, default="warning", help="of transformers")
    server.add_argument("--served-model-name", nargs="+", metavar="NAME",
                        help="names by which requests name the model, the first that of answers; left out: MODEL")
    server.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH",
                        help="load a LoRA adapter, which requests name as their model; any number of times")
    model = parser.add_argument_group("model")
    model.add_argument("--device", default="auto", help="left out: CUDA where there is a GPU")
    model.add_argument("--dtype", default="auto")
    model.add_argument("--trust-remote-code", action="store_true")
    model.add_argument("--attn-implementation", help="of transformers, where a request runs by model.generate")
    model.add_argument("--quantization", choices=("bnb-4bit", "bnb-8bit"))
    chats = parser.add_argument_group("chats")
    chats.add_argument("--chat-template", metavar="FILE", help="a template in place of the model's, or a file of one")
    chats.add_argument("--chat-template-kwargs", type=_object, default={}, metavar="JSON",
                       help="keywords of the chat template for all chats, which those of a body override")
    chats.add_argument("--reasoning", choices=("on", "off", "auto"), default="auto",
                       help="enable_thinking of the chat template; auto: the template's own default")
    for name, meaning in _IMAGE_LIMITS.items():
        chats.add_argument(f"--max-{name}", type=count, metavar="N", help=meaning)
    engine = parser.add_argument_group("engine (fields of PagedConfig, docs/options.md)")
    engine.add_argument("--engine", action="append", default=[], metavar="FIELD=VALUE",
                        help="set a field as its own option does, with a value as JSON or Python writes it")
    engine.add_argument("--continuous-batching", action="store_true",
                        help="without effect: requests always run in one batch")
    meanings, types = _meanings(), typing.get_type_hints(PagedConfig)
    for field in dataclasses.fields(PagedConfig):
        help = f"{meanings[field.name]} Left out: {_DEFAULTS.get(field.name, field.default)}"
        given: dict[str, Any] = {"dest": f"engine_{field.name}", "default": None, "help": help.replace("%", "%%")}
        kind = next(one for one in (*typing.get_args(types[field.name]), types[field.name]) if one is not type(None))
        if kind is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": kind, "metavar": kind.__name__.upper()}
        flags = [f"--{field.name.replace('_', '-')}", *_ALIASES.get(field.name, ())]
        engine.add_argument(*flags, **given)


def _meanings() -> dict[str, str]:
    """Return what each field of `PagedConfig` means, by its docstring."""
    text = str(PagedConfig.__doc__).partition("Attributes:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^ {8}(\w+): ", text, flags=re.MULTILINE)[1:]
    return {name: " ".join(meaning.split()) for name, meaning in zip(parts[::2], parts[1::2], strict=True)}


def count(text: str, least: int = 0) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {least}")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a JSON object")
    return found


def read_adapters(given: list[str]) -> dict[str, str]:
    """Return the paths of adapters by name; raises ValueError for what is no NAME=PATH, and for a repeated name."""
    adapters: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(f"--adapter {text!r}: expected NAME=PATH")
        if name in adapters:
            raise ValueError(f"--adapter {text!r}: expected a name that is given once")
        adapters[name] = path
    return adapters


def read_config(arguments: argparse.Namespace) -> PagedConfig:
    """Return the config that a command line sets; raises ValueError or TypeError for a wrong field."""
    own = {field.name: value for field in dataclasses.fields(PagedConfig)
           if (value := getattr(arguments, f"engine_{field.name}")) is not None}
    return PagedConfig(**{**_DEFAULTS, **read_pairs(arguments.engine), **own})


def serve(arguments: argparse.Namespace, program: str = "hf-paged serve") -> int:
    """Load the model and serve it until the process gets a signal to stop; returns the exit status.

    Raises:
        ImportError: a package of the server is missing.
        OSError, ValueError, TypeError: an argument is wrong; nothing was loaded.
    """
    require("serve", program)
    adapters, config = read_adapters(arguments.adapter), read_config(arguments)
    import uvicorn
    from transformers.utils import logging

    from hf_paged.server.app import build_app
    from hf_paged.server.images import ImageLimits
    from hf_paged.server.lifetime import MAX_BODY_BYTES, EndingServer, OpenAnswers
    from hf_paged.server.served_model import ServedModel, load_model

    logging.set_verbosity(logging.log_levels[arguments.log_level])
    model, processor = load_model(
        arguments.model, device=arguments.device, dtype=arguments.dtype, quantization=arguments.quantization,
        attn_implementation=arguments.attn_implementation, trust_remote_code=arguments.trust_remote_code,
        adapters=adapters)
    if arguments.chat_template is not None:
        processor.chat_template = _template(arguments.chat_template)
    limits = ImageLimits()._replace(**{
        name.replace("-", "_"): most for name in _IMAGE_LIMITS
        if (most := getattr(arguments, f"max_{name.replace('-', '_')}")) is not None})
    keywords = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}.get(arguments.reasoning, {})
    served = ServedModel(model, processor, arguments.served_model_name or [arguments.model], config,
                         {**arguments.chat_template_kwargs, **keywords}, limits)
    served.warm_up()
    answers = OpenAnswers()
    most = MAX_BODY_BYTES if arguments.max_body_bytes is None else arguments.max_body_bytes
    app = build_app(served, answers, enable_cors=arguments.enable_cors, max_body_bytes=most)
    settings = uvicorn.Config(app, host=arguments.host, port=arguments.port, log_level="info")
    EndingServer(settings, answers).run()
    return 0


def _template(given: str) -> str:
    try:
        with open(given, encoding="utf-8") as file:
            return file.read()
    except OSError:
        if "{" not in given:
            raise
        return given


def main(arguments: list[str] | None = None, program: str = "python -m hf_paged.serve") -> int:
    """Parse ``arguments`` (None: those of the process), and serve; returns the exit status."""
    parser = argparse.ArgumentParser(program)
    add_arguments(parser)
    try:
        return serve(parser.parse_args(arguments), program)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
