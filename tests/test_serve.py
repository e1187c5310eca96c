"""The command line of the server: its options, its help, and what it starts."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from threads import threads_of_engines

from hf_paged import serve
from hf_paged.config import PagedConfig
from hf_paged.serve import add_arguments, main, read_adapters, read_config


def parse(*arguments):
    parser = argparse.ArgumentParser("serve")
    add_arguments(parser)
    return parser.parse_args(["MODEL", *arguments])


def engine(*settings):
    return [argument for setting in settings for argument in ("--engine", setting)]


def config(**fields):
    return dataclasses.replace(PagedConfig(warmup="full"), **fields)


@pytest.mark.parametrize(("given", "expected"), [
    (engine("max_num_batched_tokens=100", "max_num_seqs=10"), {"max_num_batched_tokens": 100, "max_num_seqs": 10}),
    (["--max-num-seqs", "10", "--max-num-batched-tokens=100"], {"max_num_batched_tokens": 100, "max_num_seqs": 10}),
    (engine("strict=True"), {"strict": True}), (engine("strict=true"), {"strict": True}),
    (engine("warmup=False"), {"warmup": False}), (["--no-warmup"], {"warmup": False}), (["--warmup"], {"warmup": True}),
    (engine("overlap=None"), {"overlap": None}), (["--no-overlap"], {"overlap": False}), ([], {}),
    (["--strict", "--no-one-launch"], {"strict": True, "one_launch": False}),
    (engine("seed=1", "seed=2"), {"seed": 2}), (["--seed", "2", *engine("seed=1")], {"seed": 2}),
    (["--cb-num-blocks", "64", "--default-seed", "3", "--cb-max-memory-percent", "0.5"],
     {"num_blocks": 64, "seed": 3, "gpu_memory_utilization": 0.5}),
])
def test_settings_of_the_engine(given, expected):
    assert read_config(parse(*given)) == config(**expected)


def test_every_field_is_an_option_with_its_meaning(capsys):
    """By its own name, and of its own type."""
    values = {int: "32", float: "0.5", str: "auto"}
    for field in dataclasses.fields(PagedConfig):
        flag = f"--{field.name.replace('_', '-')}"
        is_flag = "bool" in str(field.type)
        kind = next((kind for kind in values if kind.__name__ in str(field.type)), None)
        given = parse(flag) if is_flag else parse(flag, values[kind])
        assert type(getattr(given, f"engine_{field.name}")) is (bool if is_flag else kind)
    with pytest.raises(SystemExit):
        parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens that a KV block holds; a power of two, at least 16. Left out: 16" in said
    assert "schedule step n + 1 while step n runs." in said


@pytest.mark.parametrize(("given", "said"), [
    (engine("max_model_len"), "'max_model_len': expected NAME=VALUE"),
    (engine("max_model_length=3"), "expected max_model_len"), (engine("zzz=1"), "a field of PagedConfig"),
    (["--max-model-len", "-1"], "max_model_len=-1: expected"), (engine("max_model_len="), "max_model_len='': expected"),
    (engine("num_gpu_blocks_override=3"), "write num_blocks="),
    (engine("strict=yes"), "strict='yes': expected one of True, False"),
    (["--max-num-seqs", "10", "--max-num-batched-tokens", "5"], "max_num_batched_tokens=5: expected at least 10"),
    (["--adapter", "a"], "--adapter 'a': expected NAME=PATH"), (["--adapter", "=x"], "expected NAME=PATH"),
    (["--adapter", "a=1", "--adapter", "a=2"], "expected a name that is given once"),
])
def test_settings_that_are_wrong_end_the_command_in_one_line(capsys, given, said):
    pytest.importorskip("fastapi", reason="of the extra `serve`")
    assert main(["/no/such/folder", *given]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_log_level_is_one_of_transformers(capsys):
    from transformers.utils import logging

    for level in logging.log_levels:
        assert parse("--log-level", level.upper()).log_level == level
    with pytest.raises(SystemExit):
        parse("--log-level", "loud")
    said = capsys.readouterr().err
    assert all(word in said for word in ("--log-level", "loud", *logging.log_levels))


@pytest.mark.parametrize("flag", ["--max-images", "--max-image-bytes", "--max-image-pixels"])
def test_limits_of_images(capsys, flag):
    for given in ("-1", "many"):
        with pytest.raises(SystemExit):
            parse(f"{flag}={given}")
        assert flag in capsys.readouterr().err
    from hf_paged.server.images import ImageLimits

    with pytest.raises(SystemExit):
        parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    for name, most in zip(ImageLimits._fields, ("16", "32 MiB", "64 Mi"), strict=True):
        meaning = said[said.index(f"--max-{name.replace('_', '-')} N ") :]
        assert meaning.index(f"Left out: {most} ") < 100
    assert ImageLimits() == (16, 32 << 20, 64 << 20)


def test_adapters_are_read_by_name():
    assert read_adapters(parse("--adapter", "a=/x", "--adapter=b=c=d").adapter) == {"a": "/x", "b": "c=d"}


def test_the_help_has_all_options_and_endpoints(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    found = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("--adapter", "--engine", "--cb-num-blocks", "--served-model-name", "--host", "--trust-remote-code",
                 "--chat-template", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health",
                 "/metrics"):
        assert word in found


def test_the_module_starts_the_server_of_its_arguments(monkeypatch, trained_path, tmp_path):
    """With all of them, and it ends its thread."""
    pytest.importorskip("fastapi", reason="of the extra `serve`")
    from hf_paged.server import app, lifetime

    ran, made, build = [], [], app.build_app
    monkeypatch.setattr(lifetime.EndingServer, "run", lambda self: ran.append(self.config))
    monkeypatch.setattr(app, "build_app", lambda served, *args, **more: made.append((served, more)) or build(
        served, *args, **more))
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main([trained_path, "--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", "8123",
                 "--served-model-name", "tiny", "--max-model-len", "77", "--reasoning", "off",
                 "--max-images", "3", "--max-image-bytes=100", "--max-body-bytes=200",
                 "--chat-template-kwargs", '{"x": 1}', "--chat-template", str(tmp_path / "template")]) == 0
    [(served, more)] = made
    try:
        assert (ran[0].port, served.names) == (8123, ["tiny"])
        assert served.engine.config.max_model_len == 77
        assert served.template_keywords == {"x": 1, "enable_thinking": False}
        assert served.processor.chat_template.startswith("{% for m")
        assert served.image_limits == (3, 100, 64 << 20)
        assert more["max_body_bytes"] == 200
        assert len(threads_of_engines()) == 1
    finally:
        served.close()
    assert threads_of_engines() == []


def test_a_wrong_template_is_named(trained_path, capsys):
    pytest.importorskip("fastapi", reason="of the extra `serve`")
    assert serve._template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(OSError, match="no-such-file"):
        serve._template("no-such-file")
    with pytest.raises(SystemExit):
        parse("--chat-template-kwargs", "[]")
    assert "'[]': expected a JSON object" in capsys.readouterr().err
