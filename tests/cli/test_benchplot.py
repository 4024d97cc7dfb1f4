"""What `h5async bench --plot` draws: the figures that it is given, and no word over another."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from h5async import ConfigError, MissingPackageError
from h5async.cli.bench import Plot, Trial

TRIALS = [
    Trial({}, [2.1e9, 2.0e9, 2.4e9], [1.0, 1.0, 1.0]),
    Trial({"shuffle": "window"}, [1.0e9, 1.1e9, 0.9e9], [0.5, 0.55, 0.4]),  # slower
    Trial({"num_threads": 4}, [2.5e9, 2.0e9, 3.9e9], [1.2, 1.0, 1.6]),  # unclear
    Trial({"num_threads": 1, "data_field": "x" * 90}, [3.0e9, 3.1e9, 3.2e9], [1.4, 1.5, 1.3]),
]
WAITS = [0.0, 1e-5, 2e-4, 3e-4, 0.2]
STAGES = {"plan": 0.1, "read": 0.4, "decode": 2.5, "upload": 0.0}


@pytest.mark.slow
def test_pictures_show_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = Plot(tmp_path / "b.png")
    plot.save("h5async bench: train.h5", TRIALS, WAITS, STAGES)
    assert (tmp_path / "b.png").read_bytes()[1:4] == b"PNG"
    speeds, waits, stages = plot.figure.axes
    assert [bar.get_width() for bar in speeds.patches] == [2.1, 1.0, 2.5, 3.1], "medians"
    rounds = [list(line.get_xdata()) for line in speeds.lines if line.get_marker() == "o"]
    assert rounds == [[s / 1e9 for s in trial.speeds] for trial in TRIALS]
    assert sum(bar.get_height() for bar in waits.patches) == len(WAITS)
    assert waits.get_title(loc="left") == "Waits of the loop, for 5 batches"
    names = [label.get_text() for label in stages.get_yticklabels()]
    assert names == ["plan", "read", "decode"], "those that took time"
    assert [text.get_text() for text in stages.texts] == ["3.3%", "13.3%", "83.3%"]


def test_no_word_lies_over_another_or_sticks_out(tmp_path: Path) -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    plot = Plot(tmp_path / "b.png")
    plot.save("h5async bench: " + "train.h5 " * 5, TRIALS, WAITS, STAGES)
    figure = plot.figure
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = []
    for panel in figure.axes:
        words = [*panel.texts, *panel.get_yticklabels(), panel.xaxis.label, panel._left_title]
        boxes += [word.get_window_extent(renderer) for word in words if word.get_text()]
    whole = figure.bbox
    for box in boxes:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def test_a_reader_that_did_nothing_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Plot(tmp_path / "b.svg").save("nothing", [Trial({}, [0.0] * 3, [0.0] * 3)], [], {})
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_what_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)  # type: ignore[arg-type]
        with pytest.raises(MissingPackageError, match=r"pip install 'h5async\[plot\]'"):
            Plot(tmp_path / "b.png")
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"b\.xyz: the name must end .*\.pdf, .*\.png"):
        Plot(tmp_path / "b.xyz")
    with pytest.raises(ConfigError, match="there is no folder"):
        Plot(tmp_path / "none" / "b.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ConfigError, match=r"b\.png cannot be written"):
        Plot(tmp_path / "b.png").save("x", TRIALS, WAITS, STAGES)
