"""Draws the pictures of the README and of docs/how-it-works.md, as SVG files in docs/images/.

.venv/bin/python scripts/make_pictures.py

Speeds are those of scripts/results/*.json, and floors those of pyproject.toml. Each picture has a
background and colours of its own, for light and dark pages.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "scripts" / "results"

STYLE = """\
<style>
text { font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
       font-size: 15px; fill: #1f2328 }
.page { fill: #ffffff; stroke: #d0d7de }
.head { font-weight: 600 }
.note { font-size: 13px; fill: #59636e }
.small { font-size: 13px }
.end { text-anchor: end }
.middle { text-anchor: middle }
.inside { fill: #ffffff }
.mono { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.ours { fill: #1f6feb } .other { fill: #afb8c1 } .box { fill: #eaeef2; stroke: #d0d7de }
.a { fill: #1f6feb } .b { fill: #bc4c00 } .c { fill: #1a7f37 }
.line { stroke: #8c959f; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .page { fill: #0d1117; stroke: #30363d }
  .note { fill: #9198a1 }
  .inside { fill: #ffffff }
  .other { fill: #57606a } .box { fill: #21262d; stroke: #30363d }
}
</style>
"""


class Bar(NamedTuple):
    """One speed of a panel."""

    name: str
    speed: float
    is_ours: bool


class Panel(NamedTuple):
    """What is compared with what, on a scale of its own."""

    title: str
    unit: str
    bars: Sequence[Bar]


def picture(width: int, height: int, title: str, shapes: Iterable[str]) -> str:
    """Return an SVG document."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n{STYLE}'
        + rect("page", 0.5, 0.5, width - 1, height - 1, 8)
        + "".join(shapes)
        + "</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text that begins at x, or ends or has its middle there, by its kind."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>\n'


def rect(kind: str, x: float, y: float, width: float, height: float, radius: float = 3) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        f' class="{kind}"/>\n'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a vertical arrow."""
    tip = 5 if to_y > y else -5
    head = f"m-4 {-tip:g}l4 {tip:g}l4 {-tip:g}"
    return f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}{head}"/>\n'


# --- throughput, beside the tools that people use now --------------------------------------------


def throughput() -> str:
    """Draw how fast h5async is, and other libraries on the same files."""
    shown = panels()
    return picture(
        800,
        356,
        "Throughput of h5async and of other libraries, higher is better",
        [
            text(24, 32, "Throughput on the same files, shuffled (more is better)", "head"),
            *(
                shape
                for number, panel in enumerate(shown)
                for shape in _panel(panel, 24 + number % 2 * 392, 66 + number // 2 * 168)
            ),
            text(24, 336, conditions(), "note"),
        ],
    )


PEERS = {
    "DataLoader, 2 workers": "DataLoader, h5py",
    "h5py": "h5py",
    "SPDL": "SPDL",
    "Grain": "Grain",
    "insitubatch": "insitubatch",
}


def panels() -> list[Panel]:
    """Return the speeds that are shown, from the results of the benches."""
    return [
        _peers("Images of 150 kB, gzip", "150 kB, gzip, shuffled"),
        _peers("Images of 150 kB, 16 in a zstd chunk", "150 kB, 16 in a zstd chunk, shuffled"),
        _sequences(
            "Robot episodes, gzip: windows of 10 steps",
            "episodes, gzip",
            {
                "ours, window": "h5async, window",
                "ours, full": "h5async, full",
                "robomimic": "robomimic",
            },
        ),
        _sequences(
            "Simulations: windows of 5 steps",
            "simulations",
            {
                "ours": "h5async",
                "h5py": "DataLoader, h5py",
                "The Well": "The Well's loader",
            },
        ),
    ]


def conditions() -> str:
    """Say how the speeds were measured."""
    found = [_results(name) for name in ("bench_peers", "bench_sequences")]
    cores = {results["machine"]["usable_cores"] for results in found}
    assert len(cores) == 1, cores
    return (
        f"{cores.pop()} cores, page cache warm, robots and simulations: medians of 5 rounds,"
        " DataLoader with the number of workers that is fastest there."
    )


def _peers(title: str, case: str) -> Panel:
    """Return the speeds of other libraries in a case, the fastest first."""
    found = next(one for one in _results("bench_peers")["cases"] if one["case"] == case)
    gigabytes = found["sample_nbytes"] / 1e9
    speeds = {name: speed * gigabytes for name, speed in found["samples_per_s"].items()}
    others = [Bar(words, speeds[name], False) for name, words in PEERS.items() if name in speeds]
    others.sort(key=lambda bar: -bar.speed)
    return Panel(title, "GB/s", [Bar("h5async", speeds["h5async"], True), *others])


def _sequences(title: str, case: str, names: dict[str, str]) -> Panel:
    # Of the others, the number of workers with which they are faster is part of the way's name.
    speeds = {
        re.sub(r", \d workers$", "", one["way"]): one["speed"]
        for one in _results("bench_sequences")["speeds"]
        if one["case"] == case
    }
    bars = [Bar(name, speeds[way], way.startswith("ours")) for way, name in names.items()]
    return Panel(title, "windows/s", bars)


def _results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _panel(panel: Panel, left: float, top: float) -> Iterator[str]:
    yield text(left, top, panel.title, "head")
    longest = max(bar.speed for bar in panel.bars)
    height = 22
    for number, bar in enumerate(panel.bars):
        y = top + 12 + number * height
        width = max(2, 140 * bar.speed / longest)
        middle = y + height / 2 + 2
        yield text(left + 142, middle, bar.name, "end")
        yield rect("ours" if bar.is_ours else "other", left + 150, y, width, height - 6)
        yield text(left + 156 + width, middle, written(bar.speed, panel.unit))


def written(speed: float, unit: str) -> str:
    """Return a speed with two or three digits."""
    if unit == "GB/s":
        return f"{speed:.1f} GB/s" if speed >= 1 else f"{speed:.2f} GB/s"
    return f"{float(f'{speed:.3g}'):,.0f}/s"


# --- the life of a batch -------------------------------------------------------------------------

LANES = ("your loop", "upload", "thread 1", "thread 2")
BATCH_KINDS = "abc"
# Lane, begin, end, batch, words.
LIFE = (
    (2, 0, 13, 0, "0: read, decode"),
    (3, 0, 12, 0, "0: read, decode"),
    (1, 13, 17, 0, "0"),
    (2, 13, 25, 1, "1: read, decode"),
    (3, 12, 26, 1, "1: read, decode"),
    (0, 17, 33, 0, "step on batch 0"),
    (1, 26, 30, 1, "1"),
    (0, 33, 49, 1, "step on batch 1"),
    (2, 33, 45, 2, "2: read, decode"),
    (3, 33, 44, 2, "2: read, decode"),
    (1, 45, 49, 2, "2"),
    (0, 49, 65, 2, "step on batch 2"),
    (2, 49, 62, 3, "3: read, decode"),
    (3, 49, 61, 3, "3: read, decode"),
    (1, 62, 65, 3, "3"),
)
SLOTS = (
    (0, 0, 33, 0, "slot 1: batch 0"),
    (1, 12, 49, 1, "slot 2: batch 1"),
    (0, 33, 65, 2, "slot 1: batch 2"),
    (1, 49, 65, 3, "slot 2: batch 3"),
)


def life_of_a_batch() -> str:
    """Draw which thread does what, and which slot holds what, while a loop takes batches."""
    left, scale = 104, 10.3
    shapes = [text(24, 32, "What happens at the same time, with prefetch=2", "head")]
    for rows, names, top in ((LIFE, LANES, 52), (SLOTS, ("memory", ""), 222)):
        shapes += [
            text(left - 12, top + 24 + 38 * lane, name, "end") for lane, name in enumerate(names)
        ]
        for lane, begin, end, batch, words in rows:
            x, y, width = left + begin * scale, top + 38 * lane, (end - begin) * scale - 2
            shapes.append(rect(BATCH_KINDS[batch % 3], x, y, width, 32))
            shapes.append(text(x + width / 2, y + 21, words, "middle inside small"))
    shapes += [
        arrow(left + 33 * scale, 304, left + 33 * scale, 336),
        text(left + 33 * scale, 354, "get_next_batch(): batch 0 ends here,", "middle note"),
        text(left + 33 * scale, 372, "and its slot is filled with batch 2", "middle note"),
        text(left + 65 * scale, 318, "time", "end note"),
    ]
    return picture(800, 388, "Threads fill one slot while the loop uses the other one", shapes)


# --- a timeline -----------------------------------------------------------------------------------

STAGE_COLOURS = {
    "wait": "#cf222e",
    "in use": "#1a7f37",
    "request": "#8250df",
    "plan": "#bf3989",
    "read": "#bf8700",
    "decode": "#1f6feb",
    "place": "#54aeff",
    "transform": "#bc4c00",
    "postprocess": "#bc4c00",
}
LEAST_WIDTH = 0.4


def timeline() -> str:
    """Draw scripts/results/timeline.json, a trace, as Perfetto does: a line for each thread."""
    events = [event for event in _results("timeline")["traceEvents"] if event["ph"] in "XM"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    done = [event for event in events if event["ph"] == "X"]
    begin = min(event["ts"] for event in done)
    scale = 632 / (max(event["ts"] + event["dur"] for event in done) - begin)
    lanes = {tid: lane for lane, tid in enumerate(threads)}
    shapes = [text(24, 32, "A trace: when each thread did what, for which batch", "head")]
    for tid, lane in lanes.items():
        name = "your loop" if "takes the batches" in threads[tid] else threads[tid].split("-")[-1]
        shapes.append(text(126, 78 + 46 * lane, name, "end small"))
    # What lies within another event comes after it, and over it.
    for event in sorted(done, key=lambda event: -event["dur"]):
        x, width = 136 + (event["ts"] - begin) * scale, event["dur"] * scale
        if width >= LEAST_WIDTH:
            is_inner = event["name"] == "request"
            y = 56 + 46 * lanes[event["tid"]] + (24 if is_inner else 0)
            shapes.append(_coloured(event["name"], x, y, width, 8 if is_inner else 32))
            if width > 24 and event["name"] in ("in use", "decode"):
                number = str(event["args"]["batch"])
                shapes.append(text(x + width / 2, y + 21, number, "middle inside small"))
    bottom = 56 + 46 * len(lanes)
    milliseconds = (max(event["ts"] + event["dur"] for event in done) - begin) / 1000
    shapes.append(text(768, bottom + 14, f"{milliseconds:.1f} ms", "end note"))
    x = 136.0
    for stage in dict.fromkeys(e["name"] for e in sorted(done, key=lambda e: e["name"])):
        shapes.append(_coloured(stage, x, bottom + 26, 12, 12))
        shapes.append(text(x + 17, bottom + 37, stage, "small"))
        x += 34 + 7.2 * len(stage)
    return picture(800, bottom + 56, "A trace: when each thread did what", shapes)


def _coloured(stage: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2"'
        f' fill="{STAGE_COLOURS[stage]}"/>\n'
    )


# --- the floors of the package -------------------------------------------------------------------


MODULES_A_ROW = 6


def floors() -> str:
    """Draw the folders of the package in the order in which they import from each other."""
    shapes = [text(24, 32, "The floors of h5async: each imports only from those below it", "head")]
    y = 50.0
    for name, sentence in floor_rows():
        height = 36 if name else 26
        if name:
            shapes.append(rect("box", 24, y, 752, 32))
            shapes.append(text(36, y + 21, f"{name}/", "mono head"))
            shapes.append(text(132, y + 21, sentence))
        else:
            shapes.append(text(132, y + 16, sentence, "mono note"))
        y += height
    return picture(800, round(y) + 14, "The floors of the package", shapes)


def layers() -> list[list[str]]:
    """Return the names of the layers that imports are checked by, the topmost first."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = options["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[name.strip() for name in layer.split("|")] for layer in found]


def floor_rows() -> Iterator[tuple[str, str]]:
    """Yield name and sentence of each folder; modules that follow each other are a row, unnamed."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    sentences = dict(re.findall(r"^  (\w+)/ +([A-Z].*)$", page, re.MULTILINE))
    names = [name for layer in layers() for name in layer]
    for is_folder, some in groupby(names, sentences.__contains__):
        if is_folder:
            yield from ((name, sentences[name]) for name in some)
        else:
            modules = [f"{name}.py" for name in some]
            for begin in range(0, len(modules), MODULES_A_ROW):
                yield "", ", ".join(modules[begin : begin + MODULES_A_ROW])


PICTURES = {
    "throughput.svg": throughput,
    "life-of-a-batch.svg": life_of_a_batch,
    "floors.svg": floors,
    "timeline.svg": timeline,
}

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
