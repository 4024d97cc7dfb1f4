"""`cli/`: what people see, and the exit codes that scripts see."""

import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from conftest import spoil_chunk
from hdf5files import type_for_h5py
from typer.testing import CliRunner

from h5async import ReaderConfig, cli
from h5async.codec.filters import Filter
from h5async.core.binding import can_decode, load_core
from h5async.system.timeline import STAGES

HAS_SCALEOFFSET = can_decode(Filter(6, (2, 32), "scaleoffset"))
BY_HDF5 = "h5py: filter 6 (scaleoffset) is decoded by HDF5"
BY_US = "direct, by the core" if load_core() else "h5py: the compiled core is missing"
SCRIPTS = sysconfig.get_path("scripts")
COLUMNS = [
    "dataset",
    "shape",
    "dtype",
    "layout",
    "chunks",
    "filters",
    "on disk",
    "decoded",
    "in order",
    "shuffled",
    "read",
]
LEGEND = "in order, shuffled: bytes read from the file for each sample used"
# What limits a reader of few and small batches.
LIMIT = (
    r"the limit is [a-z, ]+, \S+ GB/s on \d+ threads?"
    r"|the threads worked [\d.]+ % of the time: batches are too small to keep them busy; make"
    r" --batch-size or --prefetch larger"
)
TERMINAL = {"FORCE_COLOR": "1"}  # makes rich take any stream for a terminal


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    # One table, however slow the machine is.
    monkeypatch.setattr("h5async.cli.inspect.BLOCK_SECONDS", math.inf)


def run(*arguments, **environment):
    return CliRunner().invoke(cli.app, [str(item) for item in arguments], env=environment)


def succeed(*arguments, **environment):
    result = run(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result


def refuse(*arguments, exit_code=1, **environment):
    """Run what must fail; return its message, which is all that it printed."""
    result = run(*arguments, **environment)
    assert result.exit_code == exit_code, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    if exit_code == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1, "the message was wrapped"
    return result.stderr


def run_script(command, cwd, **environment):
    """Run the console script in a shell, as a user types it."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def table_rows(text):
    """Return the rows of a table as inspect prints it for a pipe: dataset -> column -> cell."""
    header, line, *lines, empty, legend = text.splitlines()
    assert (empty, legend) == ("", LEGEND)
    assert re.split(r"\s{2,}", header.strip()) == COLUMNS
    assert set(line) == {line[0]}
    cells = (re.split(r"\s{2,}", line) for line in lines)
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in cells}


def summary(result):
    """Return what read printed in the end, as key -> text; fields by their name."""
    pairs = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    fields = dict(text.split(" = ", 1) for key, text in pairs if key == "field")
    return {**dict(pairs), "fields": fields}


@pytest.fixture
def train(tmp_path):
    """100 samples in `data` and `labels`, contiguous."""
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(100 * 6, dtype=np.float32).reshape(100, 2, 3)
        file["labels"] = np.arange(100)
    return path


@pytest.fixture
def quirks(tmp_path):
    """A dataset of each layout, and some that cannot make batches."""
    path = tmp_path / "quirks.h5"
    with h5py.File(path, "w") as file:
        file["train/images"] = np.zeros((125, 10, 10))
        file.create_dataset(
            "train/packed",
            data=np.arange(200, dtype=np.uint16).reshape(50, 4) ** 2,
            chunks=(16, 4),
            shuffle=True,
            compression="gzip",
        )
        file.create_dataset("odd", data=np.arange(64), chunks=(8,), scaleoffset=0)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((8,))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I32BE, space, plist)
        virtual = h5py.VirtualLayout((125, 10, 10), np.float64)
        virtual[...] = h5py.VirtualSource(file["train/images"])
        file.create_virtual_dataset("virtual", virtual)
        sources = h5py.VirtualLayout((8,), np.int64)
        sources[0:5] = h5py.VirtualSource(".", "odd", (64,))[0:5]
        sources[4:8] = h5py.VirtualSource(".", "odd", (64,))[0:4]
        file.create_virtual_dataset("overlap", sources)
        (tmp_path / "allowed").mkdir()
        values = tmp_path / "allowed" / "values.bin"
        values.write_bytes(np.arange(5, dtype=np.int32).tobytes())
        file.create_dataset("external", (5,), np.int32, external=[(values, 0, 20)])
        sources = h5py.VirtualLayout((6,), np.int64)
        sources[...] = h5py.VirtualSource("gone.h5", "data", (6,))
        file.create_virtual_dataset("missing", sources, fillvalue=7)
        file.create_dataset("narrow", (3,), type_for_h5py())
        file["names"] = ["a", "b"]
        file["scalar"] = 3
        file["nothing"] = h5py.Empty("f4")
    return path


# --- the app -------------------------------------------------------------------------------------


def test_version():
    expected = f"h5async {importlib.metadata.version('h5async')}\n"
    assert succeed("--version").stdout == expected


def test_an_unknown_command_or_option_is_a_usage_error(train):
    assert "'read'" in refuse("red", exit_code=2)
    assert "--batch-size" in refuse("read", train, "--bath-size", 3, exit_code=2)


def test_the_console_script_in_a_pipe(quirks):
    result = run_script("h5async inspect quirks.h5 | cat", quirks.parent, COLUMNS="40")
    assert (result.returncode, result.stderr) == (0, "")
    assert table_rows(result.stdout)["train/images"]["shape"] == "(125, 10, 10)"


@pytest.mark.slow
def test_the_console_script_reports_an_error_and_its_exit_code(tmp_path):
    result = run_script("h5async read missing.h5", tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "error: cannot open missing.h5: there is no such file\n"


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_fills_every_column(quirks):
    rows = table_rows(succeed("inspect", quirks).stdout)
    with h5py.File(quirks) as file:
        packed = file["train/packed"].id
        packed_nbytes = packed.get_storage_size()
        chunks = [packed.get_chunk_info(i) for i in range(4)]
        shuffled_nbytes = sum(c.size * min(16, 50 - c.chunk_offset[0]) for c in chunks)
    assert list(rows["train/images"].values()) == [
        "train/images",
        "(125, 10, 10)",
        "float64",
        "contiguous",
        "-",
        "-",
        "100.0 kB",
        "100.0 kB",
        "800 bytes",
        "800 bytes",
        BY_US,
    ]
    assert list(rows["train/packed"].values()) == [
        "train/packed",
        "(50, 4)",
        "uint16",
        "chunked",
        "(16, 4)",
        "shuffle+deflate",
        f"{packed_nbytes} bytes",
        "400 bytes",
        f"{round(packed_nbytes / 50)} bytes",
        f"{round(shuffled_nbytes / 50)} bytes",
        BY_US,
    ]


@pytest.mark.parametrize(
    ("name", "storage", "reason"),
    [
        ("narrow", "contiguous", "its stored type differs from NumPy's"),
        ("overlap", "virtual", "a virtual dataset whose mappings overlap"),
    ],
)
def test_inspect_says_what_h5py_reads_and_why(quirks, name, storage, reason):
    row = table_rows(succeed("inspect", quirks).stdout)[name]
    assert row["layout"] == storage
    assert row["read"].startswith("h5py: ")
    assert reason in row["read"]


@pytest.mark.parametrize(
    ("name", "storage", "way"),
    [
        ("odd", "chunked", BY_US),
        ("compact", "compact", "direct"),  # its values came with the metadata
        ("virtual", "virtual", BY_US),
    ],
)
def test_inspect_says_what_is_read_directly_and_by_whom(quirks, name, storage, way):
    row = table_rows(succeed("inspect", quirks).stdout)[name]
    assert (row["layout"], row["read"]) == (storage, way)


@pytest.mark.slow
def test_without_the_core_all_is_read_through_h5py(train):
    shown = run_script("h5async inspect train.h5", train.parent, H5ASYNC_CORE="0").stdout
    ways = {row["read"] for row in table_rows(shown).values()}
    assert ways == {"h5py: the compiled core is missing"}


def test_inspect_says_what_comes_from_several_sources(tmp_path):
    path = tmp_path / "virtual.h5"
    with h5py.File(path, "w") as file:
        sources = h5py.VirtualLayout((6,), np.int64)
        for number in range(2):
            file[f"part{number}"] = np.arange(3)
            sources[3 * number : 3 * number + 3] = h5py.VirtualSource(file[f"part{number}"])
        file.create_virtual_dataset("data", sources)
    rows = table_rows(succeed("inspect", path).stdout)
    assert rows["data"]["read"] == f"{BY_US}, from 2 sources"
    assert rows["part0"]["read"] == BY_US


def test_inspect_reads_other_files_where_it_is_allowed(quirks):
    allowed = ["--allow-external", quirks.parent / "elsewhere"]
    found = succeed("inspect", quirks, *allowed).stdout
    assert table_rows(found)["external"]["read"].startswith("refused: ")
    allowed += ["--allow-external", quirks.parent / "allowed"]
    row = table_rows(succeed("inspect", quirks, *allowed).stdout)["external"]
    assert (row["layout"], row["on disk"], row["read"]) == ("external", "20 bytes", BY_US)


def test_inspect_takes_what_is_missing_for_the_fill_value_where_it_is_allowed(quirks):
    row = table_rows(succeed("inspect", quirks, "--allow-missing").stdout)["missing"]
    assert (row["layout"], row["in order"], row["read"]) == ("virtual", "0 bytes", BY_US)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scalar", "is a scalar"),
        ("nothing", "is empty"),
        ("external", "if you trust this, allow it"),
        ("missing", "lies in gone.h5, which is missing"),
    ],
)
def test_inspect_says_what_is_refused_and_why(quirks, name, reason):
    row = table_rows(succeed("inspect", quirks).stdout)[name]
    assert row["read"].startswith("refused: ")
    assert reason in row["read"]
    assert str(quirks) not in row["read"], "the reason repeats the file of every row"
    assert row["shape"] == row["layout"] == row["on disk"] == "-"


def test_inspect_lists_all_datasets(quirks):
    with h5py.File(quirks) as file:
        names = []
        file.visititems(lambda name, node: names.append(name) if hasattr(node, "shape") else None)
    assert list(table_rows(succeed("inspect", quirks).stdout)) == sorted(names)


def test_inspect_lists_links_to_datasets(quirks):
    with h5py.File(quirks.parent / "links.h5", "w") as file:
        file["link"] = h5py.ExternalLink("quirks.h5", "train/packed")
        file["group"] = h5py.ExternalLink("quirks.h5", "train")
        file["soft"] = h5py.SoftLink("/link")
        file["broken"] = h5py.ExternalLink("no.h5", "x")
    rows = table_rows(succeed("inspect", quirks.parent / "links.h5").stdout)
    assert list(rows) == ["broken", "link", "soft"]
    packed = table_rows(succeed("inspect", quirks).stdout)["train/packed"]
    for name in ("link", "soft"):
        assert {**rows[name], "dataset": "train/packed"} == packed
    assert "no.h5, which does not exist" in rows["broken"]["read"]


def test_inspect_cuts_nothing_in_a_pipe(tmp_path):
    name = "group/" * 40 + "values"
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file[name] = np.zeros(3)
    rows = table_rows(succeed("inspect", tmp_path / "long.h5", COLUMNS="40").stdout)
    assert rows[name]["read"] == BY_US


def texts_of_columns(lines):
    """Return the text of each column of a table, its lines joined, without spaces.

    A column may have a gap within, so neighbours are joined in every way, too.
    """
    width = max(map(len, lines))
    lines = [line.ljust(width) for line in lines if set(line.strip()) != {"─"}]
    is_gap = [all(line[at] == " " for line in lines) for at in range(width)]
    edges = [at for at in range(width) if is_gap[at]]
    spans = itertools.combinations([0, *edges, width], 2)
    return ["".join(line[a:b] for line in lines).replace(" ", "") for a, b in spans]


@pytest.mark.parametrize("columns", [80, 100])
def test_inspect_fits_a_terminal_and_cuts_nothing(quirks, columns):
    whole = table_rows(succeed("inspect", quirks).stdout)
    shown = succeed("inspect", quirks, COLUMNS=str(columns), **TERMINAL).stdout.splitlines()
    assert max(map(len, shown)) <= columns
    *lines, empty, legend = shown
    assert (empty, legend) == ("", LEGEND)
    assert "shape" in lines[1]
    assert "dtype" in lines[2]
    texts = texts_of_columns(lines)
    for row in whole.values():
        for column in COLUMNS:
            cell = row[column].replace(" ", "")
            assert any(cell in text for text in texts), row[column]


def test_inspect_folds_a_name_that_is_wider_than_the_terminal(tmp_path):
    name = "group" * 30
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file[name] = np.zeros(3)
    shown = succeed("inspect", tmp_path / "long.h5", COLUMNS="80", **TERMINAL).stdout
    *lines, _, _ = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.split("  ")[0].strip() for line in lines[4:]) == name


def test_inspect_is_one_line_a_dataset_on_a_wide_terminal(quirks):
    shown = succeed("inspect", quirks, COLUMNS="1000", **TERMINAL).stdout
    assert table_rows(shown) == table_rows(succeed("inspect", quirks).stdout)


def test_names_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "names.h5"
    with h5py.File(path, "w") as file:
        file["[bold]x[/bold] [/]"] = np.zeros(3)
        file["a\x1b[2Jb\tc"] = np.zeros(3)
    assert list(table_rows(succeed("inspect", path).stdout)) == [
        "[bold]x[/bold] [/]",
        r"a\x1b[2Jb\tc",
    ]
    message = refuse("read", path)
    assert '"[bold]x[/bold] [/]" (3,)' in message
    assert r'"a\x1b[2Jb' in message
    assert "\x1b" not in message


def test_inspect_an_empty_file(tmp_path):
    path = tmp_path / "empty.h5"
    h5py.File(path, "w").close()
    assert succeed("inspect", path).stdout == f"{path} holds no datasets\n"


@pytest.mark.slow
def test_python_runs_it_as_a_module(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((8, 2))
    typed = [sys.executable, "-m", "h5async", "read", path, "--no-labels", "--workers", "process"]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^samples +8$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", ["inspect", "read"])
def test_files_that_cannot_be_opened(tmp_path, command):
    (tmp_path / "text.h5").write_text("no HDF5 [file]")
    assert "there is no such file" in refuse(command, tmp_path / "missing.h5")
    assert "it is a directory" in refuse(command, tmp_path)
    assert "it is a directory; name a file" in refuse(command, ".")
    assert refuse(command, "") == "error: FILE: the path is empty, found ''\n"
    assert "--allow-external: the path is empty" in refuse(command, "a.h5", "--allow-external", "")
    assert str(tmp_path / "text.h5") in refuse(command, tmp_path / "text.h5")


# --- read: what it says --------------------------------------------------------------------------


def test_read_says_what_it_read(train):
    result = succeed("read", train, "--batch-size", 30, "--device", "cpu")
    found = summary(result)
    assert result.stderr == ""
    assert found["file"] == str(train)
    assert found["fields"] == {"data": f'"data" ({BY_US})', "labels": f'"labels" ({BY_US})'}
    assert found["epochs"] == "1"
    assert found["batches"] == "4"
    assert found["samples"] == "100"
    assert found["decoded"] == "3.2 kB"  # 100 x (6 x 4 + 8)
    assert found["device"] == "cpu"
    assert re.fullmatch(r"[\d,]+ samples/s, \S+ GB/s", found["speed"])
    assert "waited" not in found, "this loop does nothing else"
    assert re.fullmatch(LIMIT, f"the limit is {found['limit']}") or re.fullmatch(
        LIMIT, found["limit"]
    )


def test_read_has_nothing_to_tell_of_one_batch(train):
    found = summary(succeed("read", train, "--batch-size", 100))
    assert found["limit"] == "nothing to tell yet: fewer than two batches were delivered"


def test_read_counts_all_epochs(train):
    found = summary(succeed("read", train, "--epochs", 3, "--batch-size", 30))
    assert [found[key] for key in ("epochs", "batches", "samples", "decoded")] == [
        "3",
        "12",
        "300",
        "9.6 kB",
    ]


def test_read_counts_only_what_was_delivered(train):
    found = summary(succeed("read", train, "--drop-last", "--batch-size", 30))
    assert (found["batches"], found["samples"]) == ("3", "90")


@pytest.mark.parametrize("command", ["read", "bench"])
def test_nothing_to_read_is_an_error(train, command):
    message = refuse(command, train, "--drop-last", "--batch-size", 101)
    assert "an epoch has no batch: 100 samples" in message
    assert "--no-drop-last" in message
    assert "an epoch has no batch" in refuse(command, train, "--indices", "7:7")


def test_read_says_which_field_went_through_h5py(quirks):
    fields = ["--field", "x=compact", "--field", "y=overlap"]
    found = summary(succeed("read", quirks, *fields))
    assert found["fields"] == {
        "x": '"compact" (direct)',
        "y": '"overlap" (h5py: a virtual dataset whose mappings overlap)',
    }


def test_read_several_files(train):
    more = train.parent / "train2.h5"
    with h5py.File(more, "w") as file:
        file["data"] = np.zeros((50, 2, 3), np.float32)
        file["labels"] = np.arange(50)
    found = summary(succeed("read", train, more, "--batch-size", 30))
    assert (found["batches"], found["samples"]) == ("5", "150")
    assert found["file"] == f"2 files, {train} to {more}"
    assert found["fields"]["data"] == f'"data" ({BY_US}, from 2 sources)'
    found = summary(succeed("read", train.parent / "train*.h5"))
    assert found["samples"] == "150"
    assert "no file matches" in refuse("read", train.parent / "test*.h5")
    assert "there is no such file" in refuse("read", train, train.parent / "train3.h5")


def test_read_other_files_where_it_is_allowed(quirks):
    external = ["--data-field", "external", "--no-labels"]
    assert "values.bin" in refuse("read", quirks, *external)
    allowed = ["--allow-external", quirks.parent / "allowed"]
    assert summary(succeed("read", quirks, *external, *allowed))["samples"] == "5"
    missing = ["--data-field", "missing", "--no-labels"]
    assert "gone.h5" in refuse("read", quirks, *missing)
    assert summary(succeed("read", quirks, *missing, "--allow-missing"))["samples"] == "6"


def test_progress_is_shown_on_a_terminal_only(train):
    result = succeed("read", train, COLUMNS="100", **TERMINAL)
    assert "0/4" in result.stderr
    assert "batches" in result.stderr
    assert summary(result)["batches"] == "4"
    assert result.stdout.splitlines()[0].startswith("file ")


# --- read: its options ---------------------------------------------------------------------------

OPTIONS = {  # what is typed -> what the reader is given
    "--data-field x": {"data_field": "x"},
    "--labels-field y/z": {"labels_field": "y/z"},
    "--no-labels": {"labels_field": None},
    "--field a=x --field b=y=z": {"fields": {"a": "x", "b": "y=z"}},
    "--num-dim 1": {"num_dim": 1},
    "--num-dim -1": {"num_dim": -1},
    "--h-dim 2": {"h_dim": 2},
    "--w-dim 3": {"w_dim": 3},
    "--cha-dim 1": {"cha_dim": 1},
    "--batch-size 7": {"batch_size": 7},
    "--storage-option aws_region=eu --storage-option client_options={allow_http=true}": {
        "storage_options": {"aws_region": "eu", "client_options": {"allow_http": True}}
    },
    "--requests-in-flight 8 --fetch-bytes 1GiB": {
        "requests_in_flight": 8,
        "fetch_bytes": "1GiB",
    },
    "--batch-values 4096 --bucket 8": {"batch_values": 4096, "bucket": 8},
    "--shuffle full": {"shuffle": "full"},
    "--indices 100:": {"indices": "100:"},
    "--indices split/train": {"indices": "split/train"},
    "--num-dim 0,1": {"num_dim": "0,1"},
    "--sequences {groups='data/demo_*'}": {"sequences": {"groups": "data/demo_*"}},
    "--indices {name='a',parts={a=0.5}}": {"indices": {"name": "a", "parts": {"a": 0.5}}},
    "--weights balanced": {"weights": "balanced"},
    "--weights {'a.h5'=1}": {"weights": {"a.h5": 1}},
    "--epoch-samples 9": {"epoch_samples": 9},
    "--copy": {"copy": True},
    "--shuffle window": {"shuffle": "window"},
    "--shuffle none": {"shuffle": False},
    "--window-bytes 1000": {"window_bytes": "1000"},
    "--io map": {"io": "map"},
    "--seed 0": {"seed": 0},
    "--drop-last": {"drop_last": True},
    "--no-drop-last": {"drop_last": False},
    "--num-threads 0": {"num_threads": 0},
    "--workers process": {"workers": "process"},
    "--workers 4": {"workers": "4"},
    "--prefetch 3": {"prefetch": 3},
    "--device cuda:1": {"device": "cuda:1"},
    "--pin-memory": {"pin_memory": True},
    "--postprocess m.n:f": {"postprocess": "m.n:f"},
    "--postprocess m.n:f --postprocess-fields a --postprocess-fields b": {
        "postprocess": "m.n:f",
        "postprocess_fields": ["a", "b"],
    },
    "--on-error skip --max-skipped 0.5": {"on_error": "skip", "max_skipped": "0.5"},
    "--timeout 1.5": {"timeout": 1.5},
    "--max-batch-bytes 9MiB": {"max_batch_bytes": "9MiB"},
    "--decode host": {"decode": "host"},
    "--cache host": {"cache": "host"},
    "--cache-bytes 5": {"cache_bytes": "5"},
    "--cache-dir there": {"cache_dir": "there"},
    "--debug-lifetimes": {"debug_lifetimes": True},
    "--rank 1 --world-size 2": {"rank": 1, "world_size": 2},
    "--allow-external a --allow-external b/c": {"allow_external": [Path("a"), Path("b/c")]},
    "--allow-missing": {"allow_missing": True},
    "--index-cache none": {"index_cache": False},
    "--index-cache default": {"index_cache": True},
    "--index-cache a/b.h5idx": {"index_cache": "a/b.h5idx"},
    "--epochs 2": {},
    "": {},
}


class Stop(Exception):
    pass


@pytest.fixture
def loaded(monkeypatch):
    """What `ReaderConfig.load` is called with; the call itself ends the command."""
    calls = []

    def load(config, **options):
        calls.append((config, options))
        raise Stop

    monkeypatch.setattr(ReaderConfig, "load", load)
    return calls


@each("typed", OPTIONS)
def test_exactly_what_was_typed_is_passed_on(loaded, typed):
    assert isinstance(run("read", "f.h5", *typed.split()).exception, Stop)
    config, options = loaded.pop()
    assert not loaded
    assert config is None
    assert Path(options.pop("hdf5_path")) == Path("f.h5")
    if "allow_external" in options:
        options["allow_external"] = [Path(folder) for folder in options["allow_external"]]
    assert options == OPTIONS[typed]


def test_several_files_are_passed_on_in_their_order(loaded):
    assert isinstance(run("read", "b.h5", "a.h5", "--no-labels", "c*.h5").exception, Stop)
    [(_, options)] = loaded
    assert [str(path) for path in options["hdf5_path"]] == ["b.h5", "a.h5", "c*.h5"]


def test_file_may_be_left_to_the_configuration(loaded):
    assert isinstance(run("read", "--config", "c.toml").exception, Stop)
    assert [(str(config), options) for config, options in loaded] == [("c.toml", {})]


def test_every_option_of_the_reader_is_an_option_here():
    covered = set().union(*OPTIONS.values()) | {"hdf5_path", "sampler"}  # (an object)
    assert covered == set(ReaderConfig.model_fields)


def test_help_shows_the_defaults_of_the_reader():
    text = " ".join(succeed("read", "--help").stdout.split())
    shown = dict(re.findall(r"(--[a-z-]+)(?:(?! --).)*?\[default: ([^]]+)\]", text))
    for name in ("data_field", "labels_field", "batch_size", "seed", "device"):
        option = "--" + name.replace("_", "-")
        assert shown[option].partition(";")[0] == str(ReaderConfig.model_fields[name].default)
    assert shown["--shuffle"] == "none"
    assert shown["--timeout"] == "no limit"
    assert "--h-dim" not in shown


def test_typed_options_win_over_the_configuration_and_defaults_do_not(train):
    (train.parent / "c.toml").write_text(
        'hdf5_path = "train.h5"\nbatch_size = 50\ndrop_last = true\nlabels_field = "nope"\n'
    )
    config = ["--config", train.parent / "c.toml"]
    found = summary(succeed("read", *config, "--no-labels"))
    assert found["batches"] == "2"
    assert set(found["fields"]) == {"data"}
    found = summary(succeed("read", *config, "--labels-field", "labels", "--batch-size", 30))
    assert (found["batches"], found["samples"]) == ("3", "90")
    found = summary(succeed("read", *config, "--no-labels", "--batch-size=30", "--no-drop-last"))
    assert (found["batches"], found["samples"]) == ("4", "100")


def test_a_typed_file_wins_over_the_configuration(train):
    (train.parent / "c.toml").write_text('hdf5_path = "missing.h5"\n')
    found = summary(succeed("read", train, "--config", train.parent / "c.toml"))
    assert found["file"] == str(train)


def test_configurations_that_cannot_be_used(train):
    directory = train.parent
    assert "No such file" in refuse("read", "--config", directory / "missing.toml")
    (directory / "broken.toml").write_text("batch_size = [")
    assert "not a TOML file" in refuse("read", "--config", directory / "broken.toml")
    (directory / "unknown.toml").write_text("batchsize = 3")
    assert "'batch_size'" in refuse("read", train, "--config", directory / "unknown.toml")
    (directory / "no_path.toml").write_text("batch_size = 3")
    assert "FILE is required" in refuse("read", "--config", directory / "no_path.toml")


@each(
    "typed, message",
    [
        ("--batch-size 0", "--batch-size: "),
        ("--num-threads -1", "--num-threads: "),
        ("--prefetch 0", "--prefetch: "),
        ("--shuffle sometimes", "--shuffle: "),
        ("--window-bytes 0", "--window-bytes: "),
        ("--io sideways", "--io: "),
        ("--workers people", "--workers: "),
        ("--workers 0", "--workers: "),
        ("--device tpu", "--device: "),
        ("--postprocess f", "--postprocess: "),
        ("--postprocess h5async_no_such_module:f", "h5async_no_such_module"),
        ("--timeout -1", "--timeout: "),
        ("--h-dim 1", "--h-dim and --w-dim"),
        ("--num-dim 3", "no dimension 3"),
        ("--field data=data --labels-field x", "give --field or --labels-field"),
        ("--field copy=data", "'copy'"),
    ],
)
def test_values_that_the_library_refuses(train, typed, message):
    assert message in refuse("read", train, *typed.split())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--batch-size many", "--batch-size"),
        ("--epochs 0", "--epochs"),
        ("--field data", "NAME=PATH"),
        ("--field =data", "NAME=PATH"),
        ("--field data=", "NAME=PATH"),
        ("--field x=data --field x=labels", "two have the same name"),
        ("--no-labels --labels-field labels", "not both"),
    ],
)
def test_values_that_are_usage_errors(train, typed, message):
    assert message in refuse("read", train, *typed.split(), exit_code=2)


def test_no_file_at_all_is_a_usage_error():
    assert "FILE" in refuse("read", exit_code=2)
    assert "FILE" in refuse("inspect", exit_code=2)


# --- bench ---------------------------------------------------------------------------------------


def bench_lines(text):
    """Return what bench printed: who reads, the sentence, and the verdicts of trials."""
    (breakdown, sentence, speeds, verdict) = (part.splitlines() for part in text.split("\n\n"))
    assert breakdown[0].startswith("read by    ")
    assert re.fullmatch(
        r"delivered  \S+ \w+, [\d,]+ samples;"
        r" for them, \S+ \w+ were read, and [\d,]+ chunks decoded",
        breakdown[1],
    )
    stages = []
    for line in breakdown[2:]:
        stage, share = re.fullmatch(r"(\w+) +\d+\.\d{3} s of threads +(\d+\.\d)%", line).groups()
        assert 0 < float(share) <= 100
        stages.append(stage)
    assert stages
    assert set(stages) <= {*STAGES, "GIL"}
    assert len(sentence) == 1
    number, spread = r"[\d.e+-]+", r"\([\d.e+-]+ to [\d.e+-]+\)"
    given = re.fullmatch(rf"as given +{number} GB/s {spread} *", speeds[0])
    assert given, speeds[0]
    line = rf"(--.+?)  +{number} GB/s {spread} +{number}x {spread} +(.*)"
    trials = dict(re.fullmatch(line, one).groups() for one in speeds[1:])
    words = {"faster", "slower", "the same", "no verdict: the spread covers the difference"}
    assert set(trials.values()) <= words
    assert verdict[0].startswith("verdict: ")
    return breakdown[0].removeprefix("read by    "), sentence[0], trials


def test_bench_says_where_the_time_goes_and_tries_what_may_be_faster(train):
    result = succeed("bench", train, "--seconds", 0.05, "--num-threads", 2, "--device", "cpu")
    assert result.stderr == ""
    ways, sentence, trials = bench_lines(result.stdout)
    way = "core" if load_core() else "h5py"
    assert ways == f"data: {way}, labels: {way}"
    assert re.fullmatch(LIMIT, sentence)
    threads = sorted({1, 4, os.cpu_count()} - {2})
    assert list(trials) == [
        "--shuffle window",
        "--shuffle full",
        *(f"--num-threads {count}" for count in threads),
    ]


@pytest.mark.parametrize(
    ("shuffle", "others"),
    [
        ("none", {"window", "full"}),
        ("full", {"none", "window"}),
        ("window", {"none", "full"}),
    ],
)
def test_bench_tries_the_other_orders(train, shuffle, others):
    result = succeed("bench", train, "--seconds", 0, "--shuffle", shuffle, "--num-threads", 1)
    trials = bench_lines(result.stdout)[2]
    assert {name[10:] for name in trials if name.startswith("--shuffle ")} == others
    assert "--num-threads 1" not in trials


@pytest.mark.slow
def test_bench_takes_the_options_of_read(train, quirks):
    (train.parent / "c.toml").write_text('hdf5_path = "train.h5"\nlabels_field = ""\n')
    for typed in (
        [quirks, "--field", "x=compact", "--field", "y=overlap", "--batch-size", 2],
        ["--config", train.parent / "c.toml", "--batch-size", 10, "--io", "pread"],
        [train, train, "--no-labels", "--batch-size", 10, "--window-bytes", 100],
    ):
        bench_lines(succeed("bench", *typed, "--seconds", 0, "--num-threads", 1).stdout)
    typed = ["--field", "x=compact", "--field", "y=overlap", "--batch-size", 2]
    result = succeed("bench", quirks, *typed, "--seconds", 0, "--num-threads", 1)
    assert bench_lines(result.stdout)[0] == "x: memory, y: h5py"
    helped = [set(re.findall(r"--[a-z-]+", succeed(c, "--help").stdout)) for c in ("read", "bench")]
    assert helped[0] - helped[1] == {"--epochs", "--trace"}
    assert helped[1] - helped[0] == {"--seconds", "--rounds", "--plot"}


@pytest.mark.parametrize(
    ("typed", "message", "exit_code"),
    [
        ("--batch-size 0", "--batch-size: ", 1),
        ("--io sideways", "--io: ", 1),
        ("--data-field nope", '"nope"', 1),
        ("--seconds -1", "--seconds", 2),
        ("--seconds some", "--seconds", 2),
        ("--epochs 2", "--epochs", 2),
        ("--rounds 2", "--rounds", 2),
        ("--no-labels --labels-field labels", "not both", 2),
    ],
)
def test_bench_reports_errors_as_read_does(train, typed, message, exit_code):
    assert message in refuse("bench", train, *typed.split(), exit_code=exit_code)


@pytest.mark.slow
def test_bench_of_files_that_cannot_be_opened(tmp_path):
    assert "there is no such file" in refuse("bench", tmp_path / "missing.h5")
    assert "FILE" in refuse("bench", exit_code=2)
    result = run_script("h5async bench missing.h5", tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: cannot open missing.h5: there is no such file\n"


# --- read: what goes wrong -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_command_suggested_for_a_missing_dataset_works_as_typed(tmp_path, has_labels):
    with h5py.File(tmp_path / "digits.h5", "w") as file:
        file["train images/[8x8]"] = np.zeros((40, 8, 8), np.uint8)
        if has_labels:
            file["train/targets"] = np.zeros(40)
        file["other"] = np.zeros(3)
    failed = run_script("h5async read digits.h5", tmp_path, COLUMNS="30")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith('error: digits.h5: there is no dataset "data"')
    assert failed.stderr.count("\n") == 1
    command = failed.stderr.partition("try: ")[2].strip()
    assert command.startswith("h5async read ")
    result = run_script(command, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "train images/[8x8]" in result.stdout
    assert ("train/targets" in result.stdout) == has_labels


def test_a_damaged_chunk_is_named(tmp_path):
    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(64)
        file.create_dataset("data", data=data, chunks=(16,), compression="gzip")
    spoil_chunk(path, 2)
    message = refuse("read", path, "--no-labels")
    assert str(path) in message
    assert '"data"' in message
    assert "(32,)" in message


def test_a_file_that_was_cut_short(train):
    content = train.read_bytes()
    train.write_bytes(content[: len(content) // 2])
    assert str(train) in refuse("read", train)
    assert str(train) in refuse("inspect", train)


@pytest.mark.slow
def test_postprocess_is_found_in_the_current_directory(train):
    (train.parent / "mine.py").write_text("def f(data, labels):\n    raise KeyError('[mine]')\n")
    result = run_script("h5async read train.h5 --postprocess mine:f", train.parent)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "[mine]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_no_traceback(train):
    (train.parent / "mine.py").write_text(
        "import os, signal\n"
        "def f(data, labels):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise SystemExit('the signal came too late')\n"
    )
    command = "exec h5async read train.h5 --epochs 1000000 --postprocess mine:f"
    result = run_script(command, train.parent)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_another_exception_is_not_dressed_up(train, monkeypatch):
    def stream(reader, epochs, tally):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("h5async.cli.read.stream", stream)
    result = run("read", train)
    assert isinstance(result.exception, ZeroDivisionError)


# --- what is drawn, and traces ------------------------------------------------------------------


def test_read_writes_a_trace(train, monkeypatch):
    monkeypatch.setenv("HOME", str(train.parent))
    succeed("read", train, "--batch-size", 10, "--trace", "~/t.json")
    events = json.loads((train.parent / "t.json").read_text())["traceEvents"]
    assert {"wait", "in use"} <= {event["name"] for event in events}


def test_read_refuses_a_trace_that_cannot_be_written(train):
    result = run("read", train, "--trace", train.parent / "none" / "t.json")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert not result.stdout
