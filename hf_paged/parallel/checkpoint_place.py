"""Errors about the place of a checkpoint: a folder that is missing, or a file in it that is broken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from safetensors import SafetensorError, safe_open

_EXPECTED = "expected a folder that holds a checkpoint, or an id of the hub, as 'Qwen/Qwen3-8B'"
_LFS = b"version https://git-lfs"  # start of a pointer that Git LFS leaves in place of a file


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
        for file in files:
            check_file(file)
        raise


def check_file(file: str) -> None:
    """Raise ValueError if a file is no safetensors file or is cut off; the message says what to do."""
    try:
        with safe_open(file, framework="pt"):
            return
    except Exception as error:
        raise ValueError(broken(file, error)) from error


def broken(file: str, error: Exception) -> str:
    """Return the message about a safetensors file that cannot be read."""
    remedy = "download or copy it again"
    with suppress(OSError), open(file, "rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            remedy = "it is a pointer of Git LFS, for which `git lfs pull` brings the file"
    return f"{file}: expected a whole safetensors file ({error}); {remedy}"
