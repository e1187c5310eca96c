"""A GPU that nobody has: CPU tensors say that they lie on it, Triton compiles for it, and launches are noted.

For scripts in a process of their own, since Triton must not interpret there and torch is changed for good.
"""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
launched: list[str] = []  # names of kernels
compiled: list[tuple[str, str, bool]] = []  # names of kernels and of the threads that compiled them; from the disk?
variants: list[Variant] = []  # what `compile_nothing` was asked for
made: list[tuple[str, str]] = []  # names of kernels and of the threads that made what launches them
loaded: list[tuple[str, str]] = []  # the same of the threads that loaded it
no_c_compiler_in: list[str] = []  # beginnings of names of threads


class Variant(NamedTuple):
    """One compilation of a kernel: Triton's `ASTSource`, with what it is specialised on, and its options."""

    name: str
    source: Any
    options: dict[str, Any]

    def key(self, *, hints: bool = True) -> tuple[Any, ...]:
        """What it was compiled for. Without ``hints``: but for alignments, and for integers that were 1."""
        source, parameters = self.source, self.source.fn.params
        by_name = {source.fn.arg_names[path[0]] if isinstance(path, tuple) else path: value
                   for path, value in source.constants.items() if isinstance(path, str) or len(path) == 1}
        signature, constants, kept = dict(source.signature), dict(source.constants), dict(source.attrs)
        if not hints:
            ones = {parameter.name for parameter in parameters
                    if not parameter.is_constexpr and by_name.get(parameter.name) == 1}
            signature = {name: "i32" if name in ones else kind for name, kind in signature.items()}
            constants = {path: value for path, value in constants.items()
                         if (source.fn.arg_names[path[0]] if isinstance(path, tuple) else path) not in ones}
            kept = {}
        options = {name: self.options.get(name) for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl")}
        return self.name, str(signature), str(constants), str(kept), str(options)


def _load_module_from_path(name: str, path: str) -> Any:
    loaded.append((path, threading.current_thread().name))
    return SimpleNamespace(launch=lambda *args, **kwargs: launched.append(path))


def compile_module_from_src(src: str, name: str) -> Any:
    thread = threading.current_thread().name
    made.append((src, thread))
    if thread.startswith(tuple(no_c_compiler_in)):
        raise RuntimeError("Failed to find C compiler.")
    return _load_module_from_path(name, src)


class Launcher:
    """As Triton 3.6 has it: a module of C, whose source is a kernel's name here."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.launch = compile_module_from_src(src=src.fn.__name__, name="__triton_launcher").launch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.launch()


class Driver:
    """Triton's, of Hopper GPUs that run nothing."""

    device: ClassVar = 0  # the current one
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536},
        load_binary=lambda name, binary, shared, device: (0, 1, 32, 0, 1024),
        unload_module=lambda module: None,
    )

    launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def pretend() -> None:
    """From now on there is the GPU for Triton and for what asks torch about devices."""
    driver.set_active(Driver())
    triton.knobs.compilation.listener = _note
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties


def _note(*, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
    compiled.append((metadata["name"], threading.current_thread().name, cache_hit))


class Compiled(SimpleNamespace):
    """What Triton's compiler returns, for launches that only have to be noted."""

    def launch_metadata(self, *args: Any) -> None:
        return None


def compile_nothing(seconds: float = 0.0, after: threading.Event | None = None) -> None:
    """Kernels are told apart, and come to nothing after so long, or once `after` is set."""
    def compile(src: Any, target: Any = None, options: Any = None, **_: Any) -> Compiled:
        time.sleep(seconds)
        assert after is None or after.wait(timeout=240)
        name = src.fn.__name__
        compiled.append((name, threading.current_thread().name, False))
        variants.append(Variant(name, src, options if isinstance(options, dict) else vars(options)))
        return Compiled(run=lambda *args: launched.append(name), function=0, packed_metadata=(), src=src, metadata=None)

    triton.compiler.compile = compile
    own = JITFunction.create_binder

    def create_binder(kernel: JITFunction) -> Any:
        found = own(kernel)
        kernel.compile = compile
        return found

    JITFunction.create_binder = create_binder


class OnGpu(TorchFunctionMode):
    """Tensors lie on the CPU and say that they do not."""

    _asked: ClassVar = {property(lambda tensor: True): "is_cuda", property(lambda tensor: GPU): "device"}

    def __enter__(self) -> OnGpu:
        for answer, name in self._asked.items():
            setattr(torch.Tensor, name, answer)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        for name in self._asked.values():
            delattr(torch.Tensor, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(func is answer.fget for answer in self._asked):
            return func(*args)
        if func is torch.Tensor.pin_memory:
            return args[0]
        named = {key: CPU if key == "device" and value is not None else value for key, value in (kwargs or {}).items()}
        return func(*(CPU if isinstance(arg, torch.device) else arg for arg in args), **named)
