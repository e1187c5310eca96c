"""Loading for `PagedGenerator.from_pretrained`: routes the arguments and loads a whole model onto one device."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import cached_file
from transformers.utils.hub import cached_files

from hf_paged.config import OF_LOADING, PagedConfig
from hf_paged.kernels.weights_checksum import warm_up
from hf_paged.options.processors import reads_images, with_template
from hf_paged.parallel.checkpoint import check_place, find_files, naming_broken_files, naming_the_place
from hf_paged.parallel.loading import auto_class
from hf_paged.vllm_names import LOADING, SAMPLING, unknown_names

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_NO_PLACE = ("user_agent", "repo_type", "tqdm_class", "init_inputs", "kwargs", "filenames", "deprecated_kwargs",
             "class_reference", "path_or_repo_id", "pretrained_model_name_or_path")
_CONFIGS = ("config.json", "adapter_config.json", "params.json")
_ANYWHERE = ("auto", "balanced", "balanced_low_0", "sequential")
_REMEDY = ("a PagedGenerator holds the whole model on one device; for several give tensor_parallel_size=N (one model "
           "over N GPUs), or run one process a device (docs/data_parallel.md)")


def _names(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if not name.startswith("_")} - {*_NO_PLACE}


# Arguments that locate files: any file, the tokenizer's, and code next to them.
OF_FILES = frozenset(_names(cached_files))
OF_TOKENIZERS = OF_FILES | _names(PreTrainedTokenizerBase.from_pretrained) | _names(get_class_from_dynamic_module)
_OF_FIELDS = frozenset(field.name for field in dataclasses.fields(PagedConfig))
_ACCEPTED = _OF_FIELDS | OF_TOKENIZERS | _names(PreTrainedModel.from_pretrained) | {*OF_LOADING, "config"}


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    dtype: str | torch.dtype  # or "auto"
    device: torch.device
    is_mapped: bool  # a `device_map` was given
    arguments: dict[str, Any]  # others of transformers' `from_pretrained`, with trust_remote_code

    @property
    def of_files(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name in OF_FILES}

    @property
    def of_tokenizer(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name in OF_TOKENIZERS}

    def of_ranks(self, size: int) -> dict[str, Any]:
        """Return the part of `arguments` that several ranks need.

        Raises:
            ValueError: If several ranks do not support an argument.
        """
        neutral: dict[str, tuple] = {"trust_remote_code": (False,), "use_safetensors": (True,), "weights_only": (True,)}
        for name, value in self.arguments.items():
            if name in OF_FILES or value is None or any(value is one for one in neutral.get(name, ())):
                continue
            expected = (f"expected it left out with tensor_parallel_size={size}, where each rank builds transformers' "
                        "own class and reads its share of unquantized safetensors files")
            raise ValueError(unknown_argument({name: value}, expected))
        return self.of_files


def split_arguments(arguments: dict[str, Any], dtype: str | torch.dtype, device: Any, device_map: Any,
                    trust_remote_code: bool) -> tuple[Loading, dict[str, Any]]:
    """Return how to load the model, and the fields of a `PagedConfig` among `arguments`.

    Raises:
        ValueError: If `device` and `device_map` are both given, or a map has several devices.
        TypeError: If an argument changes what transformers returns, or is a vLLM name for which hf_paged has another.
    """
    overrides = {name: value for name, value in arguments.items() if name in _OF_FIELDS}
    others = {name: value for name, value in arguments.items() if name not in _OF_FIELDS}
    if unknown := {name: value for name, value in others.items() if name in LOADING or name in SAMPLING}:
        raise TypeError(unknown_argument(unknown))  # before any download
    if others.pop("output_loading_info", False):
        raise TypeError("output_loading_info=True: expected it left out; a PagedGenerator comes back alone")
    older = others.pop("torch_dtype", None)
    if older is not None and dtype == "auto":
        dtype = older
    if device is not None and device_map is not None:
        raise ValueError(f"device={str(device)!r}, device_map={device_map!r:.80}: expected one of them")
    mapped = None if device_map is None else one_device(device_map)
    found = mapped or (torch.device(device) if device is not None else _default_device())
    return Loading(dtype, found, device_map is not None, {**others, "trust_remote_code": trust_remote_code}), overrides


def one_device(device_map: Any) -> torch.device:
    """Return the device of a map with a single device.

    Raises:
        ValueError: If it has several devices or the disk; the message has the remedy.
        TypeError: If it is not a device map.
    """
    if isinstance(device_map, str) and device_map in _ANYWHERE:
        if (count := torch.cuda.device_count()) > 1:
            raise ValueError(f"device_map={device_map!r} with {count} GPUs: expected one device, such as 'cuda:0'; "
                             f"{_REMEDY}")
        return _default_device()
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    if not places or not all(isinstance(place, (str, int, torch.device)) for place in places):
        raise TypeError(f"device_map={device_map!r:.80}: expected a device's name or number, {{'': device}} or 'auto'")
    names = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    if len(names) > 1 or names & {"disk", "meta"}:
        raise ValueError(f"device_map with {sorted(names)}: expected one device; {_REMEDY}")
    return torch.device(names.pop())


def load_whole(path_or_id: str | os.PathLike, loading: Loading) -> Any:
    """Load the model onto its device, in eval mode."""
    warm_up(loading.device)
    arguments = dict(loading.arguments)
    if loading.is_mapped or arguments.get("quantization_config") is not None:  # a quantized model cannot be moved later
        arguments["device_map"] = {"": loading.device}
    files = loading.of_files
    with _naming_unknown_arguments(arguments), naming_the_place("path_or_id", path_or_id), naming_broken_files(
            lambda: find_files(str(path_or_id), **files)):
        kind = AutoModelForCausalLM
        with suppress(OSError, ValueError):  # of a folder with an adapter, transformers looks up the base model
            kind = auto_class(arguments.get("config") or AutoConfig.from_pretrained(path_or_id, **loading.of_tokenizer))
        model: Any = kind.from_pretrained(path_or_id, dtype=loading.dtype, **arguments)
    is_there = model.device.type == loading.device.type and loading.device.index in (None, model.device.index)
    return (model if is_there else model.to(loading.device)).eval()


def unknown_argument(given: dict[str, Any], expected: str = "expected a field of PagedConfig, or an argument of "
                                                           "transformers' from_pretrained") -> str:
    """Return the error message for unknown arguments of `from_pretrained`; `expected` as in `unknown_names`."""
    return unknown_names(given, _ACCEPTED, LOADING, {"generate": vars(GenerationConfig())}, expected)


@contextmanager
def _naming_unknown_arguments(arguments: dict[str, Any]) -> Iterator[None]:
    """Turn a TypeError about an argument that the model's class rejects into one about the call's argument."""
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in arguments:
            raise
        raise TypeError(unknown_argument({found[1]: arguments[found[1]]})) from error


def tokenizer_of(path_or_id: str | os.PathLike, loading: Loading) -> Any:
    """Load the processor of an image-text model, or the tokenizer; returns None without tokenizer files, where
    AutoTokenizer would make an empty one.

    Where the processor cannot be loaded, since a package is missing for example, text needs the tokenizer alone.
    """
    if not _has_any(path_or_id, TOKENIZER_FILES, loading):
        return None
    if _has_any(path_or_id, PROCESSOR_FILES, loading):
        with suppress(Exception):
            processor = with_template(AutoProcessor.from_pretrained(path_or_id, **loading.of_tokenizer))
            if reads_images(processor):
                processor.tokenizer.padding_side = "left"
                return processor
    return AutoTokenizer.from_pretrained(path_or_id, padding_side="left", **loading.of_tokenizer)


def _has_any(path_or_id: str | os.PathLike, files: tuple[str, ...], loading: Loading) -> bool:
    for file in files:
        with suppress(OSError):
            if cached_file(path_or_id, file, **loading.of_files) is not None:
                return True
    return False


def check_checkpoint(path_or_id: str | os.PathLike, loading: Loading) -> None:
    """Raise an OSError if there is no folder with this name, or no model config in it."""
    elsewhere = any(loading.arguments.get(name) for name in ("subfolder", "gguf_file"))
    check_place("path_or_id", path_or_id, () if elsewhere else _CONFIGS)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
