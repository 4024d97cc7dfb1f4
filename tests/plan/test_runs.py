"""The rows of samples of any length, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from h5async.order.rows import NO_ROW, LengthRows, SpanRows, StepRows, StepSpans

LENGTHS = np.array([3, 0, 5, 1, 0, 2], np.uint32)
STARTS = np.append(0, np.cumsum(LENGTHS, dtype=np.int64))


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("times", [1, 2, 100])
def test_lengths_alone_say_the_same_as_starts(count, times):
    spans, lengths = SpanRows(STARTS), LengthRows(LENGTHS)
    assert spans.most(count, times=times) == lengths.most(count, times=times)
    samples = np.array([5, 0, 0, 2])
    for name in ("lengths", "offsets", "rows", "total"):
        np.testing.assert_array_equal(
            getattr(spans, name)(samples), getattr(lengths, name)(samples)
        )
    np.testing.assert_array_equal(spans.starts, lengths.starts)


@pytest.mark.parametrize("pad", ["edge", "zero"])
def test_each_run_comes_once(pad):
    steps = StepRows((-1, 0), pad, np.array([0, 3]), np.array([3, 6]))
    spans = StepSpans(LengthRows(LENGTHS), steps)
    samples = np.array([3, 0, 1, 0])
    runs, places = spans.places(samples)
    assert runs.tolist() == [0, 1, 3]
    outside = NO_ROW if pad == "zero" else None
    wanted = [[outside or 3, 3], [outside or 0, 0], [0, 1], [outside or 0, 0]]
    found = [[NO_ROW if at == NO_ROW else runs[at] for at in row] for row in places.tolist()]
    assert found == wanted
    assert spans.total(samples) == 3 + 0 + 1 == spans.offsets(samples)[-1]
    assert spans.most(4, times=4) >= spans.total(samples)
    once = [1, 3, 3, 3] if pad == "zero" else [2, 6, 3, 6]
    assert spans.lengths(samples).tolist() == once
