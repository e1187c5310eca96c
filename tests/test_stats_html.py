"""The counters as HTML: all of them, nothing that a name could break, and as a browser shows it."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from chromium import document, screenshot
from support import batch, tiny_model

import hf_paged
from hf_paged.outputs import CallStats, EngineStats
from hf_paged.pictures import size

STATS = EngineStats(
    num_running=3, num_waiting=1234, num_blocks=101, num_free_blocks=40, num_preemptions=7, num_generated_tokens=56789,
    num_prefill_tokens=4321, num_steps=77, prefix_cache_queries=1000, prefix_cache_hits=250,
    kv_cache_bytes=3 * 2**29, num_pool_growths=2, num_graphs_captured=13, num_graphs_dropped=1, weights_version=9,
    num_kernels_compiled=31, num_kernels_loaded=4, num_steps_delayed=6,
    shadow_bytes=0, kv_bytes_read=5 * 2**20, kv_bytes_saved=2**19,
    calls={"native": CallStats(5, 600, {}), "lockstep": CallStats(0, 0, {}),
           "stock": CallStats(2, 30, {"a hook of <b>Mine</b> & 'yours'": CallStats(2, 30, {})})},
)


class Checked(HTMLParser):
    """Every tag is closed by its own; text is kept."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)


def test_all_counters_are_there_and_names_are_text():
    page = Checked()
    page.feed(STATS._repr_html_())
    assert not page.open and page.tags == {"style", "div", "table", "tr", "th", "td"}
    text = " | ".join(page.texts)
    for part in ("3 running", "1,234 waiting", "77 | 7 preemptions", "56,789", "4,321 of prompts", "1.5 GiB",
                 "grew 2 times", "13 | 1 dropped", "version 9", "0 B of copies",
                 "31 compiled | 4 loaded, 6 steps delayed",
                 "5.0 MiB | 512.0 KiB saved by groups", "60 of 100 (60.0%)",
                 "250 of 1,000 (25.0%)", "native | 5 | 600", "a hook of <b>Mine</b> & 'yours' | 2 | 30"):
        assert part in text, part


def test_an_engine_that_did_nothing_divides_by_nothing():
    engine = hf_paged.get_engine(model := hf_paged.enable(tiny_model()))
    empty = engine.stats()
    assert empty.num_used_blocks == 0 and "0 of 0 (0.0%)" in empty._repr_html_()
    model.generate(**batch([40]), max_new_tokens=3, do_sample=False)
    stats = engine.stats()
    assert stats.num_used_blocks == 0 and f"0 of {stats.num_blocks - 1:,} (0.0%)" in stats._repr_html_()
    assert dataclasses.asdict(stats)["num_blocks"] == stats.num_blocks


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1024.0 KiB"), (2**40, "1.0 TiB"),
    (2**52, "4096.0 TiB"),
])
def test_sizes(nbytes, text):
    assert size(nbytes) == text


PAGES = {"light": ("#ffffff", "#000000"), "dark": ("#111111", "#e0e0e0"), "editor": ("#1e1e1e", "#cccccc")}


def luminance(color):
    """As WCAG defines it, of "#rrggbb"."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_every_color_stands_out_on_light_and_dark_pages():
    """Text takes the page's color; what is opaque has the contrast to every page that graphics need."""
    style = STATS._repr_html_().partition("</style>")[0]
    values = re.findall(r"(?:color|background|border):([^;}]+)", style)
    assert {*re.findall(r"[;{](?:color|fill|stroke):([^;}]+)", style)} == {"inherit!important"}
    opaque = [value for value in values if value.startswith("#")]
    assert opaque and all(contrast(color, page) >= 3 for color in opaque for page, _ in PAGES.values())
    assert {value for value in values if value not in opaque} <= {
        "inherit!important", "transparent!important", "rgba(128,128,128,.25)", "0"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_bars(tmp_path, page):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    background, text = PAGES[page]
    file = tmp_path / "stats.html"
    rows = ".cell tbody tr:nth-child(odd){background:#f5f5f5}"  # as some notebooks color them
    file.write_text(f"<!doctype html><meta charset=utf-8><style>{rows}</style>"
                    f"<body style='margin:0;background:{background};color:{text}'>"
                    f"<div class=cell>{STATS._repr_html_()}</div></body>")
    understood = document(file, tmp_path)
    assert "1,234 waiting" in understood and "&lt;b&gt;Mine&lt;/b&gt;" in understood and "<b>" not in understood
    assert re.findall(r"width: ?([\d.]+)%", understood.rpartition("</style>")[2]) == ["60.0", "25.0"]
    picture = pyplot.imread(screenshot(file, tmp_path, 500, 500))[..., :3]
    blue = (abs(picture - [0x31 / 255, 0x82 / 255, 0xC8 / 255]) < 0.02).all(-1)
    widths = [int(count) for count in blue.sum(1) if count > 20]
    assert len(widths) >= 12 and max(widths) == pytest.approx(0.6 * 500, abs=6)
    assert min(widths) == pytest.approx(0.25 * 500, abs=6)
    # All but the bars and the text is the page, and what is left of the bars is nearer to it than to the text.
    page_color, text_color = ([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in (background, text))
    is_page = (abs(picture - page_color) < 0.02).all(-1)
    assert is_page.mean() > 0.8
    rest = picture[blue.sum(1) > 20][~blue[blue.sum(1) > 20]]
    assert (abs(rest - page_color) < abs(rest - text_color)).all(-1).mean() > 0.95
