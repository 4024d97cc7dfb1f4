"""Names that people know from other loaders lead to the option that does the same."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from h5async import ConfigError, Field, ReaderConfig
from h5async.cli import app

NAMES = {
    "subset": ("indices", "'1000:'"),
    "transform": ("postprocess", "'module:function'"),
    "collate_fn": ("postprocess", "'module:function'"),
    "num_workers": ("workers", "4"),
    "normalize": ("postprocess", "'module:function'"),
    "mean": ("postprocess", "'module:function'"),
    "std": ("postprocess", "'module:function'"),
    "window": ("shuffle", "'window'"),
}


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
def test_a_keyword(name, option, value):
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*\b{option}={value}"):
        ReaderConfig(hdf5_path="x.h5", **{name: 1})


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
def test_a_toml_file(tmp_path, name, option, value):
    path = tmp_path / "options.toml"
    path.write_text(f'hdf5_path = "x.h5"\n{name} = 1\n')
    value = value.replace("'", '"')
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*\b{option} = {value}"):
        ReaderConfig.load(path)


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
@pytest.mark.parametrize("command", ["read", "bench"])
def test_the_command_line(name, option, value, command):
    typed = name.replace("_", "-")
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, "x.h5", f"--{typed}", "1"])
    assert result.exit_code == 2
    value = value.strip("'")
    assert f"--{option.replace('_', '-')} {value}" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["seq_length", "frame_stack"])
def test_samples_of_several_rows(name):
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*fetch_data\(index\)"):
        ReaderConfig(hdf5_path="x.h5", **{name: 4})


def test_fields_have_hints_of_their_own():
    with pytest.raises(ConfigError, match=r"unknown option 'mean'; .*scale=0.5"):
        Field("data", mean=3)


def test_what_is_near_an_option_is_told_as_before():
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        ReaderConfig(hdf5_path="x.h5", batchsize=3)
