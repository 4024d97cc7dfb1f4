"""`cases.each`: all cases run, each by itself, and a failure says in which."""

from __future__ import annotations

import os

import pytest
from cases import each


@each("a", [1, 2])
@each("b, c", [("x", "y"), ("z", "w")])
def test_every_case_is_called_with_a_folder_of_its_own(tmp_path, monkeypatch, a, b, c):
    assert not list(tmp_path.iterdir())
    assert "H5ASYNC_OF_A_CASE" not in os.environ
    monkeypatch.setenv("H5ASYNC_OF_A_CASE", b)
    (tmp_path / "file").touch()


def test_a_failure_names_its_case():
    @each("number", range(4))
    def fails_at_two(number):
        assert number < 2

    with pytest.raises(AssertionError) as caught:
        fails_at_two()
    assert caught.value.__notes__ == ["In the case number=2."]


def test_cases_are_the_product_in_order():
    seen = []

    @each("a", [1, 2])
    @each("b, c", [("x", "y"), ("z", "w")])
    def collects(a, b, c):
        seen.append((a, b, c))

    collects()
    assert seen == [(1, "x", "y"), (1, "z", "w"), (2, "x", "y"), (2, "z", "w")]


def test_marks_between_cases_are_kept():
    @each("a", [1])
    @pytest.mark.parametrize("b", [2])
    @each("c", [3])
    def is_marked(a, b, c):
        assert (a, b, c) == (1, 2, 3)

    assert [mark.args for mark in is_marked.pytestmark] == [("b", [2])]
    is_marked(b=2)
