"""`h5async index`: saves the index of files, for readers that open them later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async.cli.options import spell_in_shell, takes_options, typed_options
from h5async.cli.output import Json, Ray, opening, print_json, safe
from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX, home_path, with_variables
from h5async.errors import ConfigError, H5AsyncError
from h5async.index.indexcache import cache_folder, clear_cache
from h5async.index.savedfile import NotPortableError
from h5async.index.savedindex import write_index
from h5async.io.metadatafile import opening_ahead
from h5async.io.stores import far_names
from h5async.opening.fieldkinds import index_files
from h5async.opening.filevalues import reach_of
from h5async.samples.fieldkind import AUDIO, CATEGORIES, IMAGE, NULLABLE, SHAPE, TEXTS

# Kinds of entries beside datasets' layouts.
_FACTS = (SHAPE, TEXTS, CATEGORIES, NULLABLE, IMAGE, AUDIO)

_Files = Annotated[
    list[str] | None, typer.Argument(metavar="FILES...", help="HDF5 files, or globs.")
]
_Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="INDEX", help="The index: train.h5idx.")
]
_Clear = Annotated[bool, typer.Option("--clear", help="Empty the user's cache folder of indices.")]


@takes_options(
    ["fields", "num_dim", "sequences", "io", "allow_external", "allow_missing", "storage_options"]
)
def index(
    files: _Files = None,
    output: _Output = None,
    clear: _Clear = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Save the index of FILES, which `hdf5_path` takes instead of them.

    It has all datasets of the files, by their first dimension; with --field, only these. If readers
    use groups as sequences, give the same --sequences here.
    """
    cleared = _clear() if clear else None
    if cleared is not None and not as_json:
        removed = f"removed {cleared['entries']:,} entries, {decimal(cleared['nbytes'])}"
        no_home = "there is no cache folder, because there is no home"
        typer.echo(f"{safe(cleared['folder'])}: {removed}" if cleared["folder"] else no_home)
    if clear and not files and output is None:
        if as_json:
            print_json("index", {"index": None, "left_out": [], "cleared": cleared})
        return
    if not files or output is None:
        raise typer.BadParameter("give FILES, and -o INDEX", param_hint="FILES")
    path = Path(home_path(with_variables(output)))
    if path.suffix != INDEX_SUFFIX:
        raise ConfigError(f"the name of a saved index ends in {INDEX_SUFFIX}, found {output!r}")
    config = _config(files, typed)
    reach = reach_of(config)
    refused: list[H5AsyncError] = []
    with opening(), opening_ahead(far_names(config.files)):
        found = list(index_files(config, reach, refused, ray=ray))
    left_out = [error.spelled(spell_in_shell) for error in refused]
    datasets = sum(
        len({one.path for one in file.layouts if one.kind not in _FACTS}) for file in found
    )
    try:
        write_index(path, found, reach)
    except NotPortableError as error:
        raise H5AsyncError(f"{path} cannot be made: it cannot hold {error}") from error
    except OSError as error:
        raise H5AsyncError(f"cannot write {path}: {error.strerror or error}") from error
    nbytes = path.stat().st_size
    if as_json:
        made = {"path": path, "files": len(found), "datasets": datasets, "nbytes": nbytes}
        print_json("index", {"index": made, "left_out": left_out, "cleared": cleared})
        return
    typer.echo(f"{safe(path)}: {len(found):,} files, {datasets:,} datasets, {decimal(nbytes)}")
    if left_out:
        more = f", and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        typer.echo(f"left out, because no reader can read it: {safe(left_out[0])}{more}", err=True)


def _config(files: Sequence[str], typed: Mapping[str, Any]) -> ReaderConfig:
    given = typed_options({**typed, "hdf5_path": files})
    if "fields" in given:
        num_dim = given.pop("num_dim", 0)
        given["fields"] = {
            name: {"path": field, "num_dim": num_dim} if isinstance(field, str) else field
            for name, field in given["fields"].items()
        }
    return ReaderConfig.load(given)


def _clear() -> dict[str, Any]:
    """Empty the user's cache folder; return what was removed."""
    folder = cache_folder()
    try:
        entries, nbytes = (0, 0) if folder is None else clear_cache(folder)
    except OSError as error:
        raise H5AsyncError(f"cannot empty {folder}: {error.strerror or error}") from error
    return {"folder": folder, "entries": entries, "nbytes": nbytes}
