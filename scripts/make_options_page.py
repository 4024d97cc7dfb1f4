"""Makes docs/options.md, the page of all options, out of `ReaderConfig` and `Field`.

.venv/bin/python scripts/make_options_page.py
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from h5async import Field, RaggedField, ReaderConfig
from h5async.cli.options import Option, flag, options_of
from h5async.config.kinds import KINDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "options.md"

HEAD = """\
# Options

`AsyncReader` takes its options as keywords, as a mapping, as a `ReaderConfig`, or as the path of a
[file of options](#files-of-options). Keywords win over the others. An unknown option is a
`ConfigError` that names the nearest known one. `help(h5async.ReaderConfig)` and
`h5async read --help` show the same descriptions as this page, which `scripts/make_options_page.py`
makes. So do `AsyncReader?` in a notebook, and editors, which complete the names, too. mypy and
pyright reject wrong ones, also in functions of yours that hand them on:

```python
from typing import Unpack
from h5async import AsyncReader, ReaderOptions

def training_set(**options: Unpack[ReaderOptions]) -> AsyncReader:
    return AsyncReader({"hdf5_path": "train.h5", "shuffle": "full"}, **options)
```

## Files of options

```python
AsyncReader("options.toml", batch_size=64)
```

A file of options is TOML, or JSON where its name ends in `.json`, or YAML where it ends in `.yaml`
or `.yml`, for which `pip install 'h5async[yaml]'` brings PyYAML. In TOML, which has no null, an
empty string stands for None in `labels_field` and `cache`.

- **Paths** in it are relative to the file. `$NAME` and `${NAME}` in them are variables of the
  environment, there and on the command line; one that is not set is an error. (Python callers have
  `os.environ`.) `~` is the user's home everywhere.
- **Sizes** in bytes are integers, or text: `512MiB` counts by 1,024, and `1.5GB` by 1,000.

## Options of the reader

Other pages say more: [batches](batches.md) (`prefetch`, `postprocess`, `timeout`, `cache`,
`debug_lifetimes`, `max_batch_bytes`), [files](files.md) (`hdf5_path`, `fields`, `io`,
`allow_external`), [dimensions and CF](dimensions-and-cf.md) (`num_dim`, `decode_cf`),
[shuffling](shuffling.md), [ranks](ranks-and-resume.md), [GPU](gpu.md) (`device`,
`decode`), [PyTorch](pytorch.md) (`pin_memory`) and [the helper process](helper-process.md)
(`workers`).

"""

FIELD = """
## Field

`Field` says more about one field than its path does: `fields={"image": Field("data", dtype="f4")}`,
or in a TOML file `fields.image = {path = "data", dtype = "f4"}`. The delivered value is
`stored.astype(dtype) * scale + offset`, computed in `dtype`. A path may go on into a compound type:
`"table/energy"` is one member of the rows of `table`, and only that member is delivered.

"""

KIND = """
## {name}

{meaning} In a TOML file: `kind = "{kind}"`. [More]({page}). Beside the parameters of `Field`:

"""

ANCESTOR = """
## Names in torch.async-hdf5-reader

Its `batchSize`, `nthread`, `njob` and `cuda` are `batch_size`, `num_threads`, `prefetch` and
`device` here. The other names are the same.
"""


def page() -> str:
    """Return the page."""
    options = [
        (_code(o.name), _typed(o), _values(o), _default(o), o.description)
        for o in options_of(ReaderConfig)
    ]
    return "".join(
        (
            HEAD,
            _table(("option", "command line", "values", "default", "meaning"), options),
            FIELD,
            _table(("parameter", "default", "meaning"), _parameters(Field)),
            *(_kind(kind, field) for kind, field in KINDS.items()),
            ANCESTOR,
        )
    )


def _parameters(field: type[Field], but: Collection[str] = ()) -> list[tuple[str, ...]]:
    options = (o for o in options_of(field) if o.name not in but)
    return [(_code(o.name), _default(o), o.description) for o in options]


def _kind(kind: str, field: type[Field]) -> str:
    meaning = (field.__doc__ or "").partition("\n")[0]
    left_out = [option.name for option in options_of(Field)]
    if field is not RaggedField:
        left_out += ["pad_to", "pack"]  # inherited, and refused
    page = {"image": "images.md", "audio": "audio.md"}.get(kind, "ragged.md")
    return KIND.format(name=field.__name__, meaning=meaning, kind=kind, page=page) + _table(
        ("parameter", "default", "meaning"), _parameters(field, left_out)
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _typed(option: Option) -> str:
    return _code("FILE..." if option.is_required else flag(option))


def _values(option: Option) -> str:
    words = {bool: "bool", int: "integer", float: "number", str: "string", Path: "path"}
    one = "integer, or string" if option.takes_names else words[option.type]
    if option.choices:
        numbers = [] if option.type is str else [one]
        return ", ".join([*(_code(_written(choice)) for choice in option.choices), *numbers])
    if option.is_mapping or option.values == "MODULE:FUNCTION":
        return "mapping" if option.is_mapping else "function, or string"
    if option.values == "SIZE":
        return "bytes, or a size such as `512MiB`, `1.5GB`"
    return f"{one}, or a list of them" if option.is_list else one


def _default(option: Option) -> str:
    if option.is_required:
        return "required"
    return option.default_text or _code(_written(option.default))


def _written(value: object) -> str:
    """Return a value as Python has it, strings in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
