"""HTML fragment with an engine's counters, for notebooks: it loads nothing and runs no script."""

from __future__ import annotations

from html import escape
from typing import Any

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
    rows = [
        ("requests", f"{stats.num_running:,} running", f"{stats.num_waiting:,} waiting"),
        ("steps", f"{stats.num_steps:,}", f"{stats.num_preemptions:,} preemptions"),
        ("tokens made", f"{stats.num_generated_tokens:,}", f"{stats.num_prefill_tokens:,} of prompts computed"),
        ("KV pool", size(stats.kv_cache_bytes), f"grew {stats.num_pool_growths:,} times"),
        ("KV read", size(stats.kv_bytes_read), f"{size(stats.kv_bytes_saved)} saved by groups"),
        ("CUDA graphs", f"{stats.num_graphs_captured:,}", f"{stats.num_graphs_dropped:,} dropped"),
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
