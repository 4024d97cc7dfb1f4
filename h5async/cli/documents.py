"""Writes a command's results as one JSON document; docs/command-line.md describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from h5async.cli.text import methods_of
from h5async.config import Field
from h5async.index.layout import DatasetLayout
from h5async.names import printable
from h5async.samples.samplearrays import SampleArrays

VERSION = 1  # of all schemas: raised if a key is renamed or removed, not if one is added
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]


def print_document(command: str, content: Mapping[str, Any]) -> None:
    """Print a document on standard output.

    `command` names its schema. `content` holds JSON types and dataclasses, whose attributes become
    keys.
    """
    whole = {"schema": f"h5async {command} {VERSION}", **content}
    typer.echo(json.dumps(plain(whole), indent=2, allow_nan=False))


class SampleForm(NamedTuple):
    """The form of a field's sample, as delivered.

    Attributes
    ----------
    kind
        ``"array"``, ``"Csr"``, ``"Ragged"`` or ``"Images"``.
    shape
        Its dimensions; None for those that vary.
    dtype
        Of its values.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: str


def sample_form(batch: Any) -> SampleForm:
    """Return the form of a sample, from a field of a batch."""
    if isinstance(batch, SampleArrays):
        return SampleForm(batch.kind, batch.sample_shape, str(batch.dtype))
    return SampleForm("array", batch.shape[1:], str(batch.dtype))


def field_facts(
    name: str, layout: DatasetLayout, typed: Field | None = None, form: SampleForm | None = None
) -> dict[str, Any]:
    """Return how a field of a reader is read.

    `typed` is the field in the options, and `form` that of its samples, if known.
    """
    is_direct = layout.fallback_reason is None
    inner = form.shape if form is not None and form.kind != "array" else ()
    return {
        "name": name,
        "path": layout.path if typed is None else typed.path.strip("/"),
        "shape": (layout.sample_count, *inner) if layout.is_ragged else layout.shape,
        "dtype": str(layout.dtype),
        "sample": None if form is None else form._asdict(),
        "read": "direct" if is_direct else "h5py",
        "by": methods_of(layout)[0] if is_direct else (),
        "reason": layout.fallback_reason,
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers become null, paths text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {printable(str(name)): plain(one) for name, one in value.items()}
    if isinstance(value, str | Path):
        return printable(str(value))
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
