"""Pictures of a KV cache: the requests that use each block now, and uses of the blocks over a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_paged.pictures.figure import new_figure

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
    figure = new_figure(9, 5.2 if over_time is None else 8.4)
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
