"""`h5async stats`: computes statistics of all values, and saves them for `Field(normalize=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from h5async.cli.options import reader_config, takes_reader
from h5async.cli.output import Json, Ray, counting, opening, print_json, safe
from h5async.config.files import home_path, with_variables
from h5async.config.statistics import FieldStatistics
from h5async.errors import ConfigError
from h5async.measure.statistics import QUANTILES, statistics

_Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="PATH", help="The file to write: JSON, or .toml."),
]
_Per = Annotated[
    str,
    typer.Option(
        metavar="channel|feature|none",
        help="Statistics of each channel, of each element of a row, or of all values together.",
    ),
]
_Quantiles = Annotated[
    list[float] | None,
    typer.Option("--quantile", metavar="Q", help="A share of values below. Repeatable."),
]
_SHOWN = ("mean", "std", "min", "max")
_SHOWN_GROUPS, _SHOWN_CLASSES = 4, 8


@takes_reader
def stats(
    output: _Output = None,
    per: _Per = "channel",
    quantiles: _Quantiles = None,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Compute mean, std, quantiles and frequencies of all values in FILE, and save them.

    A field takes the saved file by its option normalize. It reads each selected sample once,
    whatever the order, and regardless of normalize.
    """
    config = reader_config(typed)
    if per not in ("channel", "feature", "none"):
        raise ConfigError(f"--per must be channel, feature or none, found {per!r}")
    with opening(), counting("samples") as show:
        found = statistics(
            config,
            per=None if per == "none" else per,  # type: ignore[arg-type]
            quantiles=quantiles or QUANTILES,
            progress=show,
            ray=ray,
        )
    if output is not None:
        found.save(home_path(with_variables(output)))
    if as_json:
        content = found.as_dict()
        del content["schema"]
        print_json("stats", {"output": output, **content})
        return
    for name, one in found.items():
        typer.echo(f"{safe(name)}: {safe(one.path)}, {one.dtype}, {_amount(one)}")
        for label, text in _lines(one):
            typer.echo(f"  {label:<8}{safe(text)}")
    if output is not None:
        typer.echo(f"written to {safe(Path(output))}")


def _amount(one: FieldStatistics) -> str:
    if one.count is None:
        return "no numbers"
    nan = 0 if one.nan is None else int(one.nan.sum())
    text = f"{int(one.count.sum()):,} values" + (f", {nan:,} NaN" if nan else "")
    if one.per == "channel" and one.count.ndim:
        where = "channels" if one.channel_dim is None else f"indices of dimension {one.channel_dim}"
        text += f", for each of {one.count.size:,} {where} (--per none: of all together)"
    return text


def _lines(one: FieldStatistics) -> list[tuple[str, str]]:
    """Return what to show of a field, with labels."""
    several = {name: getattr(one, name) for name in _SHOWN}
    several |= {f"q {q}": values for q, values in (one.quantiles or {}).items()}
    lines = []
    for label, values in several.items():
        if values is not None:
            flat = np.ravel(values)
            more = f" and {flat.size - _SHOWN_GROUPS:,} more" if flat.size > _SHOWN_GROUPS else ""
            lines.append((label, " ".join(f"{v:.6g}" for v in flat[:_SHOWN_GROUPS]) + more))
    if one.frequencies:
        most = sorted(one.frequencies.items(), key=lambda pair: -pair[1])
        more = f" and {len(most) - _SHOWN_CLASSES:,} more" if len(most) > _SHOWN_CLASSES else ""
        text = ", ".join(f"{name}: {count:,}" for name, count in most[:_SHOWN_CLASSES])
        lines.append(("classes", text + more))
    return lines
