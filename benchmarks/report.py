"""Make docs/performance.md and its picture from the JSON of one visit to one machine.

    python benchmarks/report.py RUN/figures.json [MORE.json ...]     # keeps these as the visit, then writes the page
    python benchmarks/report.py [--check]                            # the page of the visit that is kept

A visit is one or more files of run_all.py of one machine and one commit, and tables of other scripts: a file with
"title", "command", "machine", "commit", "columns", "rows" (lists of texts) and, if need be, "note". The visit lies in
docs/figures/visit.json. The picture needs matplotlib and rows of vLLM; without them it stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Report = dict[str, Any]
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, VISIT, PICTURE = DOCS / "performance.md", DOCS / "figures" / "visit.json", DOCS / "figures" / "throughput.svg"
NAMES = {"ours": "hf_paged", "vllm": "vLLM", "stock": "stock `generate`", "generate_batch": "transformers' batching"}
AUTOCAST = "-autocast"
WEAK = 0.6  # of the floor
KEPT = ("workload", "model", "engine", "overrides", "tok_s", "runs", "of_floor", "ready_s", "peak_gib", "error")
WORKLOADS = {
    "nano": "256 requests with ragged prompts and outputs of 100 to 1,024 tokens, temperature 0.6",
    "single": "one greedy request of 128 prompt and 512 output tokens",
    "warm-prefix": "256 requests of 2,048 shared tokens that are in the cache, 64 of their own and 64 new ones",
    "no-prefix": "256 requests of 2,112 prompt tokens that share nothing, with 64 new ones",
    "prompts-7k": "64 prompts of 2,000 to 7,000 tokens with 64 new ones",
    "prompts-30k": "8 prompts of 30,000 tokens with 64 new ones",
    "shared-decode": "256 requests behind 4,096 shared tokens, with 64 of their own and 512 new ones",
    "shared-decode-16k": "the same behind 16,384 shared tokens",
    "rollouts": "32 prompts of 512 tokens with 16 samples of 512 tokens each",
    "rollouts-2k": "the same with prompts of 2,048 tokens",
    "short": "2,048 requests of 16 to 128 prompt and 8 to 48 output tokens",
    "group": "16 samples of one prompt of 2,048 tokens",
    "long": "one greedy request of 131,072 prompt and 128 output tokens",
}
HEAD = """# Performance

One visit: {machine}, commit {commit}, {date},
{versions}.
{ceilings}

Models have the shapes of Qwen3 and random bf16 weights. EOS is ignored, so that every engine makes equally many tokens.
A figure is the median of output tokens per second over runs after a warm-up; engines ran one after the other.
*Of floor* is the least time that the workload's bytes and FLOPs can take at the machine's measured rates
(`benchmarks/floors.py`), divided by the time that hf_paged took. A row is *weak* where another engine is faster, or
where less than {weak} of the floor is reached. [notebook.md](notebook.md) has what was tried for speed.

![Output tokens per second against vLLM](figures/throughput.svg)
"""


def load(path: Path = VISIT) -> list[Report]:
    reports: list[Report] = json.loads(path.read_text())
    return reports


def collect(paths: list[Path]) -> list[Report]:
    """The reports of a visit, with the fields that the page needs.

    Raises:
        ValueError: the files are of several machines or commits, or do not say of which.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    for key in ("machine", "commit"):
        found = {report.get(key) for report in reports}
        if len(found) != 1 or None in found:
            raise ValueError(f"{key}: expected the same in all files of a visit, got {sorted(map(str, found))}: "
                             "measure again with one commit on one machine")
    return [report if "columns" in report else
            {key: report[key] for key in ("date", "machine", "commit", "versions", "command", "ceilings")}
            | {"rows": [{key: row[key] for key in KEPT if key in row} for row in report["rows"]]}
            for report in reports]


def render(reports: list[Report]) -> str:
    """Text of the page."""
    first, limits = reports[0], reports[0].get("ceilings")
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "numpy")
    rates = ""
    if limits:
        rates = f"A copy ran at {limits['copy_tb_s']:.3g} TB/s, a GEMM at {limits['gemm_tflop_s']:.3g} TFLOP/s."
    head = HEAD.format(machine=first["machine"], commit=first["commit"], date=first["date"][:10], versions=versions,
                       ceilings=rates, weak=WEAK)
    topics: dict[str, str] = {}
    for title, text in (part for report in reports for part in tables(report)):
        topics[title] = topics.get(title, f"\n## {title}\n") + "\n" + text
    return head.replace("\n\n\n", "\n\n") + "".join(topics.values())


def tables(report: Report) -> Iterator[tuple[str, str]]:
    """The topics of a file, each with its table and the command that measured it."""
    if "columns" in report:
        yield table(report["title"], report["columns"], report["rows"], report["command"], report.get("note", ""))
        return
    rows, command = report["rows"], "python " + " ".join(without_folder(report["command"]))
    topics: list[tuple[str, Callable[[Report], bool]]] = [
        ("Workloads", lambda row: not row["workload"].startswith("batch")),
        ("Requests at once, 256 tokens in and 128 out", lambda row: row["workload"].startswith("batch")),
    ]
    for title, belongs in topics:
        for cast, where in (("", title), (AUTOCAST, f"{title}, fp32 weights under bf16 autocast")):
            mine = [row for row in rows if belongs(row) and row["engine"].endswith(AUTOCAST) == bool(cast)]
            yield from compared(where, mine, "ours" + cast, command)
    yield from without_techniques(rows, command)
    yield from started(rows, command)


def compared(title: str, rows: list[Report], own: str, command: str) -> Iterator[tuple[str, str]]:
    """Our rows with nothing switched off, beside other engines; below the table its workloads and its weak rows."""
    plain = {(row["model"], row["workload"], row["engine"]): row for row in rows if not row["overrides"]}
    others = [engine for engine in dict.fromkeys(row["engine"] for row in rows) if engine != own]
    lines, weak = [], []
    for model, workload, engine in plain:
        if engine != own:
            continue
        row, peers = plain[model, workload, own], [plain.get((model, workload, other), {}) for other in others]
        best = max((peer.get("tok_s", 0.0) for peer in peers), default=0.0)
        ratio = row["tok_s"] / best if best and "tok_s" in row else None
        lines.append([model, shown(workload), rate(row), share(row.get("of_floor")), *map(rate, peers),
                      *([share(ratio)] if others else [])])
        if "tok_s" in row and (row.get("of_floor", 1.0) < WEAK or (ratio or 1.0) < 1.0):
            weak.append(f"{model} {shown(workload)}")
    if lines:
        note = "".join(f"*{shown(name)}*: {WORKLOADS[name]}. " for name in dict.fromkeys(r["workload"] for r in rows)
                       if name in WORKLOADS)
        columns = ["model", "workload", NAMES["ours"], "of floor", *(named(other) for other in others),
                   *(["over the best other"] if others else [])]
        yield table(title, columns, lines, command, f"{note}\nWeak: {', '.join(weak) or 'none'}.")


def without_techniques(rows: list[Report], command: str) -> Iterator[tuple[str, str]]:
    """Our rows with one technique off, beside those with all."""
    whole = {(row["model"], row["workload"]): row for row in rows if row["engine"] == "ours" and not row["overrides"]}
    lines = []
    for row in rows:
        base = whole.get((row["model"], row["workload"]), {})
        if row["overrides"] and "tok_s" in row and "tok_s" in base:
            off = ", ".join(f"`{name}={value!r}`" for name, value in row["overrides"].items())
            lines.append([row["model"], shown(row["workload"]), off, rate(row), share(base["tok_s"] / row["tok_s"])])
    if lines:
        yield table("One technique off", ["model", "workload", "off", "tok/s", "gain of it"], lines, command)


def started(rows: list[Report], command: str) -> Iterator[tuple[str, str]]:
    """Seconds to the first token and peak memory, where an engine was started for a row."""
    lines = [[row["model"], named(row["engine"]), shown(row["workload"]), f"{row['ready_s']:.1f}",
              f"{row['peak_gib']:.1f}"] for row in rows if row.get("ready_s") and not row["overrides"]]
    if lines:
        columns = ["model", "engine", "workload", "seconds to the first token", "GiB of the device in use"]
        note = "From the model in memory; vLLM and nano-vllm from their start."
        yield table("Start and memory", columns, lines, command, note)


def table(title: str, columns: list[str], rows: list[list[str]], command: str, note: str = "") -> tuple[str, str]:
    lines = [f"| {' | '.join(cells)} |" for cells in [columns, *rows]]
    lines.insert(1, "|" + "---|" * len(columns))
    below = "".join(f"{textwrap.fill(line, 120)}\n\n" for line in note.split("\n") if line.strip())
    return title, "\n".join(lines) + f"\n\n`{command}`\n\n{below}".rstrip() + "\n"


def without_folder(command: list[str]) -> list[str]:
    """A command without where it wrote, which says nothing to a reader."""
    kept = list(command)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def shown(workload: str) -> str:
    return f"{workload[6:]} requests" if workload.startswith("batch ") else workload.replace("-", " ")


def named(engine: str) -> str:
    plain = engine.removesuffix(AUTOCAST)
    return NAMES.get(plain, plain) + (", autocast" if plain != engine else "")


def rate(row: Report) -> str:
    return f"{row['tok_s']:,.0f}" if "tok_s" in row else row.get("error", "")


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if the page is out of date")
    args = parser.parse_args()
    if args.check:
        return int(PAGE.read_text() != render(load()))
    if args.runs:
        VISIT.write_text(json.dumps(collect(args.runs), indent=1) + "\n")
    PAGE.write_text(render(load()))
    import comparison_plot

    if not comparison_plot.plot(load(), PICTURE):
        print("no picture: matplotlib is not installed, or the visit has no row of vLLM")
    return 0


if __name__ == "__main__":
    sys.exit(main())
