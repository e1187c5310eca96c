"""Pictures of an engine: its KV cache by matplotlib, and its counters as HTML.

The pictures of a KV cache show the requests that use each block now, and uses of the blocks over a trace.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_paged.optional import require

# Colors of blocks without one owner; a block that one request uses has that request's color.
_FREE, _CACHED, _SHARED = (0.93, 0.93, 0.93), (0.97, 0.91, 0.72), (0.15, 0.15, 0.18)
_NAMED_OWNERS = 12  # at most in the legend, which would outgrow the figure
USES = {"private": "#1f6fb2", "shared": "#26262e", "cached": "#f7e8b8", "free": "#ededed"}


class CacheView(NamedTuple):
    """Snapshot of the blocks of a pool, without the null block: block i + 1 is at index i.

    Attributes:
        users: [N] int32, how many requests use the block.
        cached: [N] bool, whether the prefix cache finds the block by its content.
        owners: block numbers by the name of the request that uses them, in the order of its tokens.
        block_size: tokens per block.
    """

    users: np.ndarray
    cached: np.ndarray
    owners: Mapping[str, Sequence[int]]
    block_size: int

    @property
    def counts(self) -> dict[str, int]:
        """Number of blocks that one request uses, several use, only the prefix cache keeps, and that are free."""
        unused = self.users == 0
        kinds = {"private": self.users == 1, "shared": self.users > 1, "cached": unused & self.cached,
                 "free": unused & ~self.cached}
        return {name: int(kind.sum()) for name, kind in kinds.items()}


def draw(view: CacheView, trace: str | os.PathLike | None) -> Any:
    """Draw a figure of the pool now, and below it, if `trace` names a file, of the uses of its blocks over time.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: there is no trace in that file.
    """
    over_time = None if trace is None else use_over_time(Path(trace))
    size = 9, 5.2 if over_time is None else 8.4  # in inches
    figure = _figure_class()(figsize=size, layout="constrained")
    panels = figure.subplots(1 if over_time is None else 1 + len(over_time), 1, squeeze=False)[:, 0]
    _draw_blocks(panels[0], view)
    for panel, (title, times, columns) in zip(panels[1:], over_time or (), strict=True):
        panel.stackplot(times, *(columns[name] for name in USES), labels=list(USES), colors=list(USES.values()))
        panel.set(xlabel="seconds of the trace", ylabel="blocks", title=title, xlim=(times[0], times[-1]),
                  ylim=(0, None))
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure


def block_colors(view: CacheView, palette: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the colors [N, 3] of all blocks: the color of a block's only owner, or of its kind."""
    colors = np.empty((len(view.users), 3))
    colors[:] = np.where(view.cached[:, None], _CACHED, _FREE)
    for i, blocks in enumerate(view.owners.values()):
        colors[np.asarray(blocks, np.int64) - 1] = palette[i % len(palette)][:3]
    colors[view.users > 1] = _SHARED
    return colors


def use_over_time(path: Path) -> list[tuple[str, list[float], dict[str, list[float]]]]:
    """Return, for each engine in a trace, its name, times in seconds, and numbers of blocks by use at these times.

    Raises:
        ValueError: the file holds no counters of blocks.
    """
    text = path.read_text().rstrip()
    events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    found: dict[int, tuple[list[float], dict[str, list[float]]]] = {}
    for event in events:
        if event["ph"] == "C" and event["name"] == "KV blocks by use":
            times, columns = found.setdefault(event["pid"], ([], {name: [] for name in USES}))
            times.append(event["ts"] / 1e6)
            for name, column in columns.items():
                column.append(event["args"][name])
    if not found:
        raise ValueError(f"trace={str(path)!r}: expected a file of hf_paged.trace in which an engine made steps")
    return [(names[pid], times, columns) for pid, (times, columns) in found.items()]


def _draw_blocks(panel: Any, view: CacheView) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    palette = [colormaps["tab20"](i) for i in range(20)]
    num_blocks, counts = len(view.users), view.counts
    columns = max(8, int(np.ceil(np.sqrt(num_blocks * 2.5))))
    rows = max(1, -(-num_blocks // columns))
    grid = np.ones((rows * columns, 3))
    grid[:num_blocks] = block_colors(view, palette)
    panel.imshow(grid.reshape(rows, columns, 3), interpolation="nearest", aspect="auto")
    panel.set(xticks=[], yticks=[])
    if rows <= 64:  # more rows would leave only grid lines visible
        panel.set_xticks(np.arange(-0.5, columns), minor=True)
        panel.set_yticks(np.arange(-0.5, rows), minor=True)
        panel.grid(which="minor", color="white", linewidth=0.6)
    panel.tick_params(which="minor", length=0)
    panel.spines[:].set_visible(False)
    used = counts["private"] + counts["shared"]
    panel.set_title(f"{num_blocks:,} blocks of {view.block_size} tokens: {used:,} used by {len(view.owners)}, "
                    f"{counts['shared']:,} of them shared, {counts['cached']:,} cached, {counts['free']:,} free",
                    fontsize=9)
    owners = [Patch(color=palette[i % 20], label=f"{name} ({len(blocks)})")
              for i, (name, blocks) in enumerate(view.owners.items())]
    handles = owners[:_NAMED_OWNERS]
    if len(owners) > _NAMED_OWNERS:
        handles.append(Patch(color="white", label=f"and {len(owners) - _NAMED_OWNERS} more"))
    for color, name in ((_SHARED, "shared"), (_CACHED, "cached"), (_FREE, "free")):
        handles.append(Patch(color=color, label=name))
    panel.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)


@cache
def _figure_class() -> Any:
    """Return a `matplotlib.figure.Figure` for notebooks; matplotlib's global state and windows are not touched."""
    require("plot", "a picture")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Figure that notebooks show also where pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=80)
            return written.getvalue()

    return Picture


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Text has the page's color, and only bars have a background, in colors that stand out on light and dark pages. Some
# notebooks set both color and background of table rows: a mix of theirs and the page's could make text invisible.
_STYLE = (
    "<style>.hf-paged{font:13px/1.5 system-ui,sans-serif;max-width:44em}"
    ".hf-paged table{border-collapse:collapse;margin:.4em 0;width:100%}"
    ".hf-paged :is(table,tr,th,td){color:inherit!important;background:transparent!important}"
    ".hf-paged td,.hf-paged th{text-align:left;padding:.1em .8em .1em 0;border:0;vertical-align:top}"
    ".hf-paged td:nth-child(2),.hf-paged td:nth-child(3),.hf-paged th:nth-child(2),.hf-paged th:nth-child(3)"
    "{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".hf-paged .bar{background:rgba(128,128,128,.25);height:.8em;border-radius:2px;overflow:hidden}"
    ".hf-paged .bar div{background:#3182c8;height:100%}"
    ".hf-paged .why{padding-left:1.2em;opacity:.75}</style>"
)


def stats_html(stats: Any) -> str:
    """Return HTML of an `EngineStats`: two bars (KV blocks, prefix cache), counters, and calls by path."""
    usable = max(stats.num_blocks - 1, 0)
    dropped = [f"{stats.num_graphs_dropped:,} dropped",
               *(f"{number:,} by {reason}" for reason, number in stats.graphs_dropped_by.items())]
    rows = [
        ("requests", f"{stats.num_running:,} running", f"{stats.num_waiting:,} waiting"),
        ("steps", f"{stats.num_steps:,}", f"{stats.num_preemptions:,} preemptions"),
        ("tokens made", f"{stats.num_generated_tokens:,}", f"{stats.num_prefill_tokens:,} of prompts computed"),
        ("KV pool", size(stats.kv_cache_bytes), f"grew {stats.num_pool_growths:,} times"),
        ("KV read", size(stats.kv_bytes_read), f"{size(stats.kv_bytes_saved)} saved by groups"),
        ("CUDA graphs", f"{stats.num_graphs_captured:,}", ", ".join(dropped)),
        ("kernels", f"{stats.num_kernels_compiled:,} compiled",
         f"{stats.num_kernels_loaded:,} loaded, {stats.num_steps_delayed:,} steps delayed"),
        ("weights", f"version {stats.weights_version:,}", f"{size(stats.shadow_bytes)} of copies"),
    ]
    counters = "".join(f"<tr><th>{escape(name)}</th><td>{escape(one)}</td><td>{escape(other)}</td></tr>"
                       for name, one, other in rows)
    bars = _bar("KV blocks in use", stats.num_used_blocks, usable) + _bar(
        "prompt tokens from the prefix cache", stats.prefix_cache_hits, stats.prefix_cache_queries)
    return f'{_STYLE}<div class="hf-paged">{bars}<table>{counters}</table>{_calls(stats.calls)}</div>'


def size(nbytes: int) -> str:
    """Format a number of bytes, as "1.5 GiB"."""
    power = max(0, (max(nbytes, 1).bit_length() - 1) // 10)
    power = min(power, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


def _bar(name: str, part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return (f"<div>{escape(name)}: {part:,} of {whole:,} ({share:.1%})</div>"
            f'<div class="bar" role="img" aria-label="{share:.1%}"><div style="width:{100 * share:.1f}%"></div></div>')


def _calls(calls: Any) -> str:
    lines = []
    for path, counted in calls.items():
        lines.append(f"<tr><td>{escape(path)}</td><td>{counted.num_calls:,}</td><td>{counted.num_tokens:,}</td></tr>")
        lines += [f'<tr><td class="why">{escape(reason)}</td><td>{one.num_calls:,}</td><td>{one.num_tokens:,}</td></tr>'
                  for reason, one in counted.by_reason.items()]
    return f"<table><tr><th>calls by path</th><th>calls</th><th>tokens</th></tr>{''.join(lines)}</table>"
