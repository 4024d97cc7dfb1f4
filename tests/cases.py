"""A test and a table of cases enter; one test that goes through all of them leaves."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each of some values in turn, as `pytest.mark.parametrize` does in many tests.

    For what varies the way to one and the same result: orders, threads, dtypes. All of them run
    with scripts/test --all, else a sample (see tests/conftest.py). Each call has a
    `monkeypatch` and a `tmp_path` of its own; all other fixtures are shared, and where one is a
    path in `tmp_path`, so is that. A failure names its case, and ends the test. Several of these
    make the product of their values.
    """
    keys = [name.strip() for name in names.split(",")]
    cases = [(value,) if len(keys) == 1 else tuple(value) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        table: list[dict[str, Any]] = [
            {**dict(zip(keys, case, strict=True)), **inner}
            for case, inner in itertools.product(cases, getattr(test, "_cases", [{}]))
        ]
        inner_test = getattr(test, "_test", test)

        @functools.wraps(test)
        def all_of_them(**fixtures: Any) -> None:
            for number, case in enumerate(table):
                _call(inner_test, case, number, fixtures)

        parameters = inspect.signature(test).parameters.values()
        kept = [parameter for parameter in parameters if parameter.name not in keys]
        all_of_them.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        all_of_them._cases, all_of_them._test = table, inner_test  # type: ignore[attr-defined]
        return all_of_them

    return decorate


def _call(
    test: Callable[..., None], case: dict[str, Any], number: int, fixtures: dict[str, Any]
) -> None:
    own = dict(fixtures)
    folder = own.get("tmp_path")
    others = [value for value in own.values() if isinstance(value, Path)]
    if folder is not None and not any(folder in other.parents for other in others):
        own["tmp_path"] = folder / f"case{number}"
        own["tmp_path"].mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        try:
            test(**own, **case)
        except Exception as error:
            text = ", ".join(f"{name}={value!r}" for name, value in case.items())
            error.add_note(f"In the case {text}.")
            raise
