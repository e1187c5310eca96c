"""The trace event format as a JSON schema, and what has to hold of the tracks of any file of it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

_COMMON = {"pid": {"type": "integer", "minimum": 0}, "tid": {"type": "integer", "minimum": 0},
           "name": {"type": "string", "minLength": 1}, "args": {"type": "object"}}
_TS = {"ts": {"type": "number", "minimum": 0}}


def _kind(ph: str, more: dict[str, Any], args: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {"ph": {"const": ph}, **_COMMON, **more}
    if args is not None:
        properties["args"] = args
    return {"type": "object", "properties": properties, "required": sorted(properties.keys() - {"cname"}),
            "additionalProperties": False}


_NAMES = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
          "thread_sort_index": "sort_index"}
_META = [
    _kind("M", {"name": {"const": name}}, {
        "type": "object", "properties": {key: {"type": "string" if key == "name" else "integer"}}, "required": [key],
        "additionalProperties": False,
    }) for name, key in _NAMES.items()
]
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "array",
    "items": {"oneOf": [
        _kind("X", {**_TS, "dur": {"type": "number", "minimum": 0}, "cname": {"type": "string"}}),
        _kind("B", _TS), _kind("E", _TS),
        _kind("i", {**_TS, "s": {"enum": ["t", "p", "g"]}}),
        _kind("C", _TS, {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}), *_META,
    ]},
}


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file that is right: the format, and the nesting of every track."""
    events = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(events)
    for track in tracks(events).values():
        check_nesting(track)
    return events


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Events that stand on a track, by process and track, in the order of the file."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] in "XBEi":
            found[event["pid"], event["tid"]].append(event)
    return dict(found)


def check_nesting(track: list[dict[str, Any]]) -> None:
    """Spans of one track follow each other or lie in each other, and a begin comes in the file before what is in it."""
    edges: list[tuple[float, str, str]] = []
    last = 0.0
    for event in track:
        assert event["ts"] >= last, f"{event} comes after what it should precede"
        last = event["ts"]
        if event["ph"] == "X":
            end = round(event["ts"] + event["dur"], 3)
            edges += [(event["ts"], "B", event["name"]), (end, "E", event["name"])]
            last = end
        elif event["ph"] in "BE":
            edges.append((event["ts"], event["ph"], event["name"]))
    open_: list[str] = []
    for ts, ph, name in edges:
        if ph == "B":
            open_.append(name)
        else:
            assert open_ and open_[-1] == name, f"{name} ends at {ts} in the middle of {open_}"
            open_.pop()
    assert not open_, f"{open_} never end"


def names(events: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    """"process_name" by pid, or "thread_name" by pid and tid."""
    return {event["pid"] if kind == "process_name" else (event["pid"], event["tid"]): event["args"]["name"]
            for event in events if event["name"] == kind}
