"""A process that compiles kernels for a GPU that its machine does not have.

Shapes, dtypes, alignments and properties of the device decide which kernels a step launches, and values never do. So
tensors lie on the CPU and answer that they lie on the GPU, kernels are launched dry, and what torch would compute is
zeros. Triton compiles for the target, under the keys that launches on such a GPU have.
"""

from __future__ import annotations

import atexit
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hf_paged.device import adjacent

DEVICE, _HOST = torch.device("cuda", 0), torch.device("cpu")
# A GPU gives large tensors pages of their own, to which kernels may want them aligned.
_LARGE, _PAGE = 1 << 20, 2 << 20


class GpuModel(NamedTuple):
    """Properties of a GPU on which the choice of kernels depends.

    Attributes:
        shared_memory: most bytes of a block.
        memory: bytes of the GPU, which bound the sequences at once of models with recurrent states.
    """

    capability: tuple[int, int]
    num_multiprocessors: int
    shared_memory: int
    memory: int


# By compute capability, of A100 (80 GB), A40, L40S, H100 (SXM), B200 and RTX PRO 6000.
_GPUS = {
    80: GpuModel((8, 0), 108, 163 << 10, 79 << 30), 86: GpuModel((8, 6), 84, 99 << 10, 44 << 30),
    89: GpuModel((8, 9), 142, 99 << 10, 44 << 30), 90: GpuModel((9, 0), 132, 227 << 10, 79 << 30),
    100: GpuModel((10, 0), 148, 227 << 10, 178 << 30), 120: GpuModel((12, 0), 188, 99 << 10, 94 << 30),
}


def gpu_model(capability: int, num_multiprocessors: int | None = None, memory: int | None = None) -> GpuModel:
    """Return the properties of a GPU of a compute capability (90: 9.0).

    Args:
        num_multiprocessors: None for those of the GPU in the table.
        memory: the same in bytes.

    Raises:
        ValueError: the capability is not in the table.
    """
    if (found := _GPUS.get(capability)) is None:
        raise ValueError(f"sm={capability}: expected one of {', '.join(map(str, _GPUS))}")
    multiprocessors = found.num_multiprocessors if num_multiprocessors is None else num_multiprocessors
    return found._replace(num_multiprocessors=multiprocessors, memory=found.memory if memory is None else memory)


def pretend(gpu: GpuModel) -> None:
    """Let Triton, and what reads torch's properties of devices, find this GPU from now on, for the rest of the process.

    Functions of `torch.cuda` answer as `answers_of` says.

    Raises:
        ImportError: this Triton has no compiler for NVIDIA GPUs.
    """
    from triton.runtime import driver

    major, minor = gpu.capability
    driver.set_active(_Driver(10 * major + minor))
    for name, answer in answers_of(gpu).items():
        setattr(torch.cuda, name, answer)
    adjacent.AdjacentMemory = _AdjacentMemory  # type: ignore[misc]
    _make_driver_modules()


def answers_of(gpu: GpuModel) -> dict[str, Callable[..., Any]]:
    """Return what functions of `torch.cuda` answer by the description of a GPU, and for all others what raises."""
    properties = SimpleNamespace(multi_processor_count=gpu.num_multiprocessors, major=gpu.capability[0],
                                 minor=gpu.capability[1], shared_memory_per_block_optin=gpu.shared_memory,
                                 total_memory=gpu.memory)
    refused: dict[str, Callable[..., Any]] = {
        name: partial(_refuse, name) for name, value in vars(torch.cuda).items()
        if isfunction(value) and not name.startswith("_") and value.__module__.startswith("torch.cuda")}
    return refused | {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "device": _Current,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties, "get_allocator_backend": lambda: "native",
        "mem_get_info": lambda device=None: (gpu.memory, gpu.memory),
        "memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "current_stream": lambda device=None: None, "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None, "Event": _Event,
    }


def place_as_on_gpu(model: torch.nn.Module) -> None:
    """Give large parameters other memory, aligned as on a GPU, in place of their values."""
    for parameter in model.parameters():
        if parameter.nbytes >= _LARGE:
            parameter.data = _pages(parameter.shape, parameter.dtype)


def _pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written."""
    count = shape.numel()
    memory = mmap.mmap(-1, count * dtype.itemsize + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"torch.cuda.{name}: expected no question to a GPU that is not there but those that `pretend` "
                       "answers. Report the model's class.")


class _Current(nullcontext[None]):
    """Of `torch.cuda.device`."""


class _Driver:
    """Triton's driver of a GPU on which nothing is launched or loaded."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher

        self._target, self.launcher_cls = GPUTarget("cuda", arch, 32), CudaLauncher

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _AdjacentMemory(adjacent.AdjacentMemory):
    """An allocator that places tensors side by side in one tensor, if they could be placed on the GPU."""

    def read_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        width = pieces[0].shape[1]
        return pieces[0].as_strided((sum(map(len, pieces)), width), (width, 1))

    def _in_order(self, like: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        memory = _pages(torch.Size([sum(sizes)]), torch.uint8)
        pieces = zip(memory.split(list(sizes)), like, strict=True)
        return memory.data_ptr(), [piece.view(one.dtype).view(one.shape) for piece, one in pieces]


class CountsAsGpu(TorchFunctionMode):
    """Tensors on the CPU answer that they lie on the GPU, and go there in place; products of floats are zeros."""

    _GETTERS: ClassVar = {getattr(torch.Tensor, name).__get__: answer
                          for name, answer in {"is_cuda": True, "is_cpu": False, "device": DEVICE}.items()}
    _PRODUCTS: ClassVar = frozenset({
        torch.nn.functional.linear, torch.nn.functional.embedding, torch.matmul, torch.Tensor.matmul,
        torch.Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.cat,
        getattr(torch, "_grouped_mm", torch.mm), getattr(torch.nn.functional, "grouped_mm", torch.mm)})

    def __init__(self) -> None:
        super().__init__()
        self._zeros: dict[torch.dtype, torch.Tensor] = {}  # of any shape: no step writes values that matter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._GETTERS:
            found = func(*args)
            return found if args[0].device != _HOST else self._GETTERS[func]
        if func in self._PRODUCTS and "out" not in kwargs:
            with suppress(NotImplementedError, RuntimeError):
                return self._shaped(func, args, kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # the upload behind it is a tensor of its own
        if func is torch.Tensor.record_stream or (func is torch.Tensor.copy_ and args[0].is_floating_point()):
            return args[0]
        if func is torch.histc:  # a CPU counts floats only
            args = args[0].float(), *args[1:]
        if func is torch.empty and _on_host(kwargs.get("device")) is _HOST:
            made = func(*args, **kwargs | {"device": "meta", "pin_memory": False})
            if made.nbytes >= _LARGE:
                return _pages(made.shape, made.dtype)
        kwargs = {name: _on_host(value) if name == "device" else value for name, value in kwargs.items()}
        kwargs.pop("pin_memory", None)
        return func(*map(_on_host, args), **kwargs)

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return zeros of the result's dtype and shape, which the meta device says; integers are computed."""
        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        made = func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
        if not made.is_floating_point():
            return func(*args, **kwargs)
        zeros = self._zeros.get(made.dtype)
        if zeros is None or len(zeros) < made.numel():
            zeros = self._zeros[made.dtype] = torch.zeros(made.numel(), dtype=made.dtype, device=_HOST)
        return zeros[: made.numel()].view(made.shape)


def _on_host(value: Any) -> Any:
    """Return the CPU for the GPU, and any other argument as it is."""
    is_gpu = isinstance(value, (str, torch.device)) and str(value) in ("cuda", "cuda:0")
    return _HOST if is_gpu else value


# -- modules in C by which Triton calls the driver --------------------------------------------------------------------


def _make_driver_modules() -> None:
    """Have Triton compile its module of the driver, and find a library to link launchers with; load none of them.

    They call functions of libcuda, which only a machine with a GPU has. A stand-in that has their names is enough for
    the linker; the process that loads them finds the driver's own.
    """
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build

    build._load_module_from_path = lambda name, path: _Module()
    with suppress(Exception):  # no C compiler: each process makes the modules itself, or can launch no kernel
        folder = Path(driver.__file__).parent
        sources = [path.read_text() for path in (folder / "driver.py", folder / "driver.c") if path.is_file()]
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", "".join(sources))))
        stand_in = Path(tempfile.mkdtemp(prefix="hf_paged_libcuda"))
        atexit.register(shutil.rmtree, stand_in, ignore_errors=True)
        code = "".join(f"void {name}(void) {{}}\n" for name in names)
        compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-x", "c", "-",
                    "-o", str(stand_in / "libcuda.so.1")]
        subprocess.run(compiler, input=code, text=True, check=True, capture_output=True)
        knobs.nvidia.libcuda_path = str(stand_in)
        driver.CudaUtils()


class _Module:
    """A module that is on the disk and was not loaded."""

    def __getattr__(self, name: str) -> None:
        return None
