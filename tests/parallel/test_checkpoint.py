"""A folder that is missing, and a file that is broken, are named by whatever was to read them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_model

from hf_paged import PagedGenerator
from hf_paged.cli import main
from hf_paged.integration.explain import preview
from hf_paged.parallel.checkpoint import check_place, naming_broken_files, naming_the_place

ROOT = Path(__file__).parents[2]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
MISSING = ["/no/such/folder", "./no-such", "../no/such", "models/no/such", "~/no-such-folder", "no-such/", "."]


def load(path):
    return PagedGenerator.from_pretrained(path)


def load_over_ranks(path):
    return PagedGenerator.from_pretrained(path, tensor_parallel_size=2)


def load_adapter(path):
    pytest.importorskip("peft")
    with PagedGenerator(tiny_model(), num_blocks=16) as generator:
        generator.load_adapter("one", path)


def check(path):
    return preview(path, {})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize("path", MISSING)
@pytest.mark.parametrize("read", [load, load_over_ranks, load_adapter, check])
def test_a_missing_folder_is_said_to_be_missing(read, path):
    kind, words = (FileNotFoundError, "there is no such folder") if path != "." else (OSError, "")
    with pytest.raises(kind, match=re.escape(f"{path!r}") + f".*{words}"):
        read(path)


def test_the_command_says_so_in_one_line(capsys):
    assert main(["check", "/no/such/folder"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-paged: model='/no/such/folder': there is no such folder") and said.count("\n") == 1


def test_what_lies_in_the_home_folder_is_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(FileNotFoundError, match=re.escape(f"write {str(tmp_path / 'model')!r}")):
        load("~/model")


def test_a_name_that_may_be_an_id_is_looked_for_in_both_places(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for read in (load, check):
        with pytest.raises(OSError, match=r"='models/no-such': there is no such folder in .*as an id of the hub: "):
            read("models/no-such")


def test_the_revision_of_an_id_may_have_slashes(tmp_path):
    for name in ("Qwen/Qwen3-8B@refs/pr/1", "gpt2@refs/pr/1", "Qwen/Qwen3-8B@main"):
        check_place("MODEL", name)
    for path in ("models/no/such@refs/pr/1", "/no/such@main", "./no@refs/pr/1"):
        with pytest.raises(FileNotFoundError, match=re.escape(f"MODEL={path!r}: there is no such folder")):
            check_place("MODEL", path)
    (tmp_path / "a@b").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder has no config\.json"):
        check_place("MODEL", "a@b", ["config.json"])


def test_a_file_and_a_folder_without_a_config(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(NotADirectoryError, match="it is a file, expected a folder"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no config\.json, expected.*found \['model\.safetensors'\]"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json"):
        load_adapter(tmp_path)


@pytest.mark.each_value
@pytest.mark.parametrize(("content", "remedy"), [
    (lambda data: data[: len(data) // 2], "download or copy it again"), (lambda data: b"", "download or copy it again"),
    (lambda data: POINTER, "git lfs pull"),
], ids=["cut", "empty", "pointer"])
@pytest.mark.parametrize("read", [load, load_over_ranks, lambda path: preview(path, {}, load=True)],
                         ids=["load", "ranks", "check"])
def test_a_broken_file_is_named(tmp_path, trained_path, read, content, remedy):
    path = shutil.copytree(trained_path, tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(f"{file}: expected a whole safetensors file") + f".*{remedy}"):
        read(str(path))


def test_a_broken_file_of_an_adapter_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=re.escape(f"{file}: expected a whole safetensors file")):
        load_adapter(str(tmp_path))


def test_other_errors_come_through(tmp_path, trained_path):
    whole = os.path.join(trained_path, "model.safetensors")
    with pytest.raises(KeyError), naming_broken_files(lambda: [whole]), naming_the_place("a", "b/c"):
        raise KeyError
    with pytest.raises(OSError, match=r"^full$"), naming_the_place("a", tmp_path):
        raise OSError("full")
    for error in (OSError(errno.ENOSPC, "full"), PermissionError(errno.EACCES, "denied", "x"), FileNotFoundError("x")):
        with pytest.raises(OSError) as raised, naming_the_place("a", "b/c"):
            raise error
        assert raised.value is error
    check_place("a", "Qwen/Qwen3-8B", ["config.json"])
    check_place("a", tmp_path)


@pytest.mark.slow
def test_the_server_says_so_in_one_line():
    pytest.importorskip("fastapi", reason="of the extra `serve`")
    done = subprocess.run([sys.executable, "-m", "hf_paged.serve", "/no/such/folder"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("MODEL='/no/such/folder': there is no such folder") and done.stderr.count("\n") == 1
