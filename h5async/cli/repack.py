"""`h5async repack`: writes HDF5 files anew, with other chunks, filters or samples."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async.cli.options import takes_model, typed_options
from h5async.cli.output import REFRESH_SECONDS, Json, Ray, print_json, progress_bar, safe
from h5async.config.files import home_path, with_variables
from h5async.packing.repackoptions import RepackOptions

_Files = Annotated[list[str], typer.Argument(metavar="IN...", help="HDF5 files, or globs.")]
_Output = Annotated[
    str, typer.Option("--output", "-o", metavar="OUT", help="The file to write; may be one of IN.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; say what would be done.")]


@takes_model(RepackOptions)
def repack(
    files: _Files,
    output: _Output,
    dry_run: _DryRun = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Write IN anew, with other chunks, filters or samples; several files become one.

    All else stays: groups, attributes, links, references, dimension scales, datatypes. Chunks about
    which nothing changes are copied as they are stored.
    """
    from h5async.packing.newfiles import repack
    from h5async.packing.rewriting import Plan

    options = typed_options(typed, RepackOptions)
    if "fields" in options:
        options["fields"] = [path for one in options["fields"] for path in one.split(",")]
    sources = [home_path(with_variables(one)) for one in files]
    out = Path(home_path(with_variables(output)))
    with progress_bar("bytes") as bar:
        task, shown = bar.add_task(""), perf_counter()

        def show_plan(plan: Plan) -> None:
            if not as_json:
                _print_plan(plan)

        def show(done: int, count: int) -> None:
            nonlocal shown
            if perf_counter() - shown > REFRESH_SECONDS:
                shown = perf_counter()
                bar.update(task, completed=done, total=count)
                bar.refresh()

        found = repack(
            sources, out, dry_run=dry_run, planned=show_plan, progress=show, ray=ray, **options
        )
    if as_json:
        datasets = [one._asdict() for one in found.plan.datasets]
        plan = {**found.plan._asdict(), "datasets": datasets}
        print_json("repack", {"paths": found.paths, "plan": plan})
    elif not dry_run:
        for path in found.paths:
            typer.echo(f"{safe(path)}: {decimal(path.stat().st_size)}")


def _print_plan(plan: Any) -> None:
    for one in plan.datasets:
        chunks = f", chunks {one.chunks}" if one.chunks else ""
        typer.echo(f"  {safe(one.path)}  {one.how}: {one.shape}{chunks}, {decimal(one.nbytes)}")
    for path, reason in plan.left_out.items():
        typer.echo(f"  {safe(path)} is left out: it {reason}")
    typer.echo(f"at most about {decimal(plan.memory_nbytes)} of rows are in memory at a time")
