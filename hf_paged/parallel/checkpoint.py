"""Safetensors files of a checkpoint: their catalogue, and reading parts of tensors at the page cache's speed."""

from __future__ import annotations

import ctypes
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from hf_paged.device.cuda import num_cores

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Limits of what a thread has staged for a device, and mapped, at a time: mapped pages count as the process's memory
# until the file is closed.
_CHUNK_BYTES, _BATCH_BYTES, _MOST_THREADS = 32 << 20, 64 << 20, 8
_CHECK_EVERY_S = 0.1
_INTEGERS = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16}
_EXPECTED = "expected a folder that holds a checkpoint, or an id of the hub, as 'Qwen/Qwen3-8B'"
_LFS = b"version https://git-lfs"  # start of a pointer that Git LFS leaves in place of a file


class Entry(NamedTuple):
    """Tensor of a checkpoint; `dtype` by its name in safetensors."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class CheckpointSlice(NamedTuple):
    """Slice `start` to `stop` along `dim` of the tensor `key`, or of its `matrix`-th matrix, and its target.

    `target` is a contiguous tensor on any device and in any float dtype; cut in another dimension than its first, a
    matrix.
    """

    key: str
    dim: int
    start: int
    stop: int
    target: torch.Tensor
    matrix: int | None = None


class _Chunk(NamedTuple):
    key: str
    place: tuple[slice, ...]
    target: torch.Tensor
    bytes_mapped: int


def find_files(path_or_id: str, **where: Any) -> list[str]:
    """Return the safetensors files of a local directory or a hub id (from the hub's cache, if they are there).

    Args:
        **where: arguments of transformers' `cached_file`: revision, token, ...

    Raises:
        FileNotFoundError: there are no files, or a file that the index names is missing.
        ValueError: the index is invalid, or an adapter lies beside the weights, which transformers would apply.
    """
    if (adapter := _cached(path_or_id, ADAPTER_CONFIG_NAME, where)) is not None:
        raise ValueError(
            f"{adapter}: an adapter, which cannot be sharded: expected a checkpoint that it is merged into "
            "(merge_and_unload, then save_pretrained)"
        )
    if (single := _cached(path_or_id, SAFE_WEIGHTS_NAME, where)) is not None:
        return [single]
    if (index := _cached(path_or_id, SAFE_WEIGHTS_INDEX_NAME, where)) is None:
        found = f"; found {sorted(os.listdir(path_or_id))}" if os.path.isdir(path_or_id) else ""
        raise FileNotFoundError(f"{path_or_id}: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}{found}")
    files = []
    try:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected JSON with a weight_map from keys to files ({error!r})") from error
    for name in names:
        if (file := _cached(path_or_id, name, where)) is None:
            raise FileNotFoundError(f"{path_or_id}: {name} is missing, which {SAFE_WEIGHTS_INDEX_NAME} names")
        files.append(file)
    return files


def _cached(path_or_id: str, name: str, where: dict[str, Any]) -> str | None:
    return cached_file(path_or_id, name, **where, _raise_exceptions_for_missing_entries=False)


def catalogue(files: Iterable[str]) -> dict[str, Entry]:
    """Return all tensors of these files by key. Reads the headers only.

    Raises:
        ValueError: a file is no safetensors file, or is cut off, or a key is in two files; the message names them.
    """
    entries: dict[str, Entry] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 (no mapping)
                found = {key: Entry(file, tuple(s.get_shape()), str(s.get_dtype())) for key, s in slices.items()}
        except Exception as error:
            raise ValueError(broken(file, error)) from error
        if twice := next((key for key in found if key in entries), None):
            raise ValueError(f"{twice} is in {entries[twice].file} and in {file}: expected it in one of them")
        entries |= found
    return entries


def read(pieces: Iterable[CheckpointSlice], entries: dict[str, Entry],
         check: Callable[[], None] = lambda: None) -> None:
    """Fill every piece's target, all on one device; each thread uses a few chunks of host memory at a time.

    Args:
        check: called several times a second; when it raises, reading ends with its error.
    """
    batches = deque(_batches(pieces, entries))
    if not batches:
        return
    device = batches[0][1][0].target.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the threads' streams do not wait for kernels that still use the targets
    threads = min(_MOST_THREADS, num_cores(), len(batches))
    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(_work, batches, device) for _ in range(threads)]
        try:
            while wait(workers, timeout=_CHECK_EVERY_S).not_done:
                check()
        except BaseException:
            batches.clear()  # leaving the pool waits for its threads
            raise
        for worker in workers:
            worker.result()


def same(pieces: Iterable[CheckpointSlice], entries: dict[str, Entry]) -> bool:
    """Return whether the targets hold already what `read` would write."""
    for file, chunks in _batches(pieces, entries):
        with safe_open(file, framework="pt") as handle:
            for chunk in chunks:
                if not torch.equal(_slice(handle, chunk).to(chunk.target.dtype), chunk.target.cpu()):
                    return False
    return True


def _batches(pieces: Iterable[CheckpointSlice], entries: dict[str, Entry]) -> Iterator[tuple[str, list[_Chunk]]]:
    """Yield batches of chunks of one file, as many as may be mapped at once, in the order of the file's pieces."""
    by_file: dict[str, list[CheckpointSlice]] = {}
    for piece in pieces:
        if piece.start < piece.stop:
            by_file.setdefault(entries[piece.key].file, []).append(piece)
    for file, group in by_file.items():
        batch: list[_Chunk] = []
        size = 0
        for piece in group:
            for chunk in _chunks(piece, entries[piece.key]):
                batch.append(chunk)
                size += chunk.bytes_mapped
                if size >= _BATCH_BYTES:
                    yield file, batch
                    batch, size = [], 0
        if batch:
            yield file, batch


def _chunks(piece: CheckpointSlice, entry: Entry) -> Iterator[_Chunk]:
    """Yield rows of the target in chunks: contiguous in memory, and in the file at most columns are left out."""
    matrix = () if piece.matrix is None else (slice(piece.matrix, piece.matrix + 1),)
    width = torch.Size(entry.shape[1 if piece.matrix is None else 2:]).numel()
    row_bytes = width * max(DTYPES[entry.dtype].itemsize, piece.target.element_size())
    step = max(1, _CHUNK_BYTES // row_bytes)
    for row in range(0, len(piece.target), step):
        end = min(row + step, len(piece.target))
        if piece.dim == 0:
            place: tuple[slice, ...] = (slice(piece.start + row, piece.start + end),)
        else:
            place = (slice(row, end), slice(piece.start, piece.stop))
        yield _Chunk(piece.key, (*matrix, *place), piece.target[row:end], (end - row) * row_bytes)


def _work(batches: deque[tuple[str, list[_Chunk]]], device: torch.device) -> None:
    staging = _Staging(device) if device.type == "cuda" else None
    try:
        while True:
            try:
                file, chunks = batches.popleft()
            except IndexError:
                return
            with safe_open(file, framework="pt") as handle:
                for chunk in chunks:
                    (staging or _fill)(chunk.target, _slice(handle, chunk))
    except BaseException:
        batches.clear()  # the other threads end, too
        raise


def _slice(handle: Any, chunk: _Chunk) -> torch.Tensor:
    """Return the chunk's part of the file: a view of mapped pages, which are read when the view is copied."""
    part: torch.Tensor = handle.get_slice(chunk.key)[chunk.place]
    return part.reshape(chunk.target.shape) if part.ndim > chunk.target.ndim else part


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the host by numpy, in one thread: torch's copy would start a pool of threads in every thread."""
    if target.dtype != source.dtype:
        target.copy_(source)
        return
    integer = next(integer for integer in _INTEGERS if _divides_by(integer, target) and _divides_by(integer, source))
    np.copyto(_array(target.view(integer)), source.view(integer).numpy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array. `numpy()` would keep its storage from being resized later."""
    strides = [step * tensor.element_size() for step in tensor.stride()]
    nbytes = sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)) + tensor.element_size()
    memory: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), _INTEGERS[tensor.dtype], memory, strides=strides)


def _divides_by(integer: torch.dtype, tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be viewed as this integer: numpy copies wide types faster, and lacks bfloat16."""
    sizes = tensor.shape[-1], *tensor.stride()[:-1], tensor.storage_offset()
    small = tensor.element_size() < integer.itemsize
    return not small or all(size * tensor.element_size() % integer.itemsize == 0 for size in sizes)


class _Staging:
    """Pinned memory and stream of one thread: while this thread copies to the device, other threads read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        pinned = self._memory[: target.nbytes].view(target.dtype).view(target.shape)
        _fill(pinned, source)
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
        self._stream.synchronize()


def check_place(name: str, path_or_id: Any, configs: Iterable[str] = ()) -> None:
    """Raise an OSError for a path that is no folder, if the path cannot be an id (ID@REVISION) of the hub.

    Args:
        name: name of the argument.
        configs: files, of which the folder has to hold one.
    """
    path = os.fspath(path_or_id)
    if os.path.isfile(path):
        raise NotADirectoryError(f"{name}={path!r}: it is a file, {_EXPECTED}")
    if not os.path.isdir(path):
        if os.path.isabs(path) or path.startswith((".", "~")) or path.endswith(os.sep) or _is_too_deep(path):
            home = os.path.expanduser(path)
            hint = f"; write {home!r}, since '~' is the shell's" if home != path and os.path.isdir(home) else ""
            raise FileNotFoundError(f"{name}={path!r}: there is no such folder, {_EXPECTED}{hint}")
        return
    if configs and not any(os.path.isfile(os.path.join(path, config)) for config in configs):
        raise FileNotFoundError(f"{name}={path!r}: the folder has no {next(iter(configs))}, {_EXPECTED}; found "
                                f"{sorted(os.listdir(path))!r:.300}")


def _is_too_deep(path: str) -> bool:
    """Return whether a path has more slashes than an id of the hub, not counting a revision (``@refs/pr/1``)."""
    return path.partition("@")[0].count("/") > 1


@contextmanager
def naming_the_place(name: str, path_or_id: Any) -> Iterator[None]:
    """Add to transformers' OSErrors about an id of the hub that there is no folder of this name.

    OSErrors with an errno (a full disk) and of subclasses are left as they are: callers distinguish them.
    """
    try:
        yield
    except OSError as error:
        path = os.fspath(path_or_id)
        if type(error) is not OSError or error.errno is not None or os.path.isdir(path):
            raise
        raise OSError(f"{name}={path!r}: there is no such folder in {os.getcwd()!r}, and as an id of the hub: "
                      f"{error}") from error


@contextmanager
def naming_broken_files(find: Any) -> Iterator[None]:
    """Raise errors of safetensors as ValueErrors that name the file; ``find()`` returns the files."""
    try:
        yield
    except SafetensorError:
        files: list[str] = []
        with suppress(Exception):  # the first error says more than one of `find`
            files = find()
        catalogue(files)
        raise


def broken(file: str, error: Exception) -> str:
    """Return the message about a safetensors file that cannot be read."""
    remedy = "download or copy it again"
    with suppress(OSError), open(file, "rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            remedy = "it is a pointer of Git LFS, for which `git lfs pull` brings the file"
    return f"{file}: expected a whole safetensors file ({error}); {remedy}"
