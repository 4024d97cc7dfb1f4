"""Names that people know from other loaders lead to the option that does the same."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from h5async import ConfigError, Field, ReaderConfig
from h5async.cli import app

NAMES = {
    "subset": ("indices", '"1000:"'),
    "transform": ("postprocess", '"module:function"'),
    "collate_fn": ("postprocess", '"module:function"'),
    "num_workers": ("workers", "4"),
    "normalize": ("postprocess", '"module:function"'),
    "mean": ("postprocess", '"module:function"'),
    "std": ("postprocess", '"module:function"'),
    "window": ("shuffle", '"window"'),
    "max_tokens": ("batch_values", "65536"),
    "group_by_length": ("bucket", "8"),
}


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
def test_a_keyword(name, option, value):
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*\b{option}={value}"):
        ReaderConfig(hdf5_path="x.h5", **{name: 1})


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
def test_a_toml_file(tmp_path, name, option, value):
    path = tmp_path / "options.toml"
    path.write_text(f'hdf5_path = "x.h5"\n{name} = 1\n')
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*\b{option} = {value}"):
        ReaderConfig.load(path)


@pytest.mark.parametrize(("name", "option", "value"), [(n, *of) for n, of in NAMES.items()])
@pytest.mark.parametrize("command", ["read", "bench"])
def test_the_command_line(name, option, value, command):
    typed = name.replace("_", "-")
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, "x.h5", f"--{typed}", "1"])
    assert result.exit_code == 2
    value = value.strip('"')
    assert f"--{option.replace('_', '-')} {value}" in " ".join(result.output.split())


STEPS = ("seq_length", "sequence_length", "frame_stack", "num_steps", "window_size")
STEPS += ("n_steps_input", "episode_length", "pad_seq_length", "get_pad_mask")
OF_FIELD = {"pad_seq_length": 'pad="edge"', "get_pad_mask": 'pad_mask="mask"'}


@pytest.mark.parametrize("name", STEPS)
def test_samples_of_several_rows(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        ReaderConfig(hdf5_path="x.h5", **{name: 4})
    assert f"unknown option '{name}'; " in str(caught.value)
    assert 'fields={"x": Field("x", steps=range(0, 10))}' in str(caught.value)

    wanted = OF_FIELD.get(name, "steps=range(0, 10)")
    with pytest.raises(ConfigError, match=rf"unknown option '{name}'; .*{re.escape(wanted)}"):
        Field("x", **{name: 4})

    path = tmp_path / "options.toml"
    path.write_text(f'hdf5_path = "x.h5"\n{name} = 4\n')
    with pytest.raises(ConfigError) as caught:
        ReaderConfig.load(path)
    assert 'fields.x = {path = "x", steps = "0:10"}' in str(caught.value)

    path.write_text(f'hdf5_path = "x.h5"\nfields.y = "y"\nfields.x = {{path = "x", {name} = 4}}\n')
    wanted = OF_FIELD.get(name, 'steps="0:10"').replace("=", " = ")
    with pytest.raises(ConfigError, match=rf"fields: x: unknown option '{name}'; .*{wanted}"):
        ReaderConfig.load(path)

    typed = f"--{name.replace('_', '-')}"
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["read", "x.h5", typed, "4"])
    assert result.exit_code == 2
    assert 'fields.x = {path = "x", steps = "0:10"} in the file of --config' in result.output


def test_what_the_hints_say_is_taken(tmp_path):
    for steps in range(10), "0:10":
        assert ReaderConfig(hdf5_path="x.h5", fields={"x": Field("x", steps=steps)})
    (tmp_path / "x.toml").write_text("""
        hdf5_path = "x.h5"
        fields.x = {path = "x", steps = "0:10", pad = "edge", pad_mask = "mask"}
        sequences = {groups = "data/demo_*", only = "mask/train"}
    """)
    assert ReaderConfig.load(tmp_path / "x.toml").fields["x"].steps == tuple(range(10))


@pytest.mark.parametrize("name", ["filter_by_attribute", "hdf5_filter_key"])
def test_some_groups(name):
    with pytest.raises(ConfigError, match=r'sequences=Sequences\(.*, only="mask/train"\)'):
        ReaderConfig(hdf5_path="x.h5", **{name: "train"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dtype", 'Field("x", dtype="float32", '),
        ("region", 'Field("x", region={1: slice(64, 192)})'),
        ("roi", 'Field("x", region={1: slice(64, 192)})'),
        ("filename", 'the files are given as hdf5_path="train.h5"'),
    ],
)
def test_options_of_fields_and_names_of_files(name, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        ReaderConfig(hdf5_path="x.h5", **{name: 4})


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
@pytest.mark.parametrize("name", ["seq_length", "filter_key", "roi", "flip", "dense"])
def test_what_a_hint_shows_can_be_written_in_the_file(tmp_path, suffix, name):
    path, in_toml = tmp_path / f"x.{suffix}", suffix == "toml"
    first = 'hdf5_path = "x.h5"' if in_toml else '{"hdf5_path": "x.h5"'
    path.write_text(f"{first}\n{name} = 4\n" if in_toml else f'{first}, "{name}": 4}}')
    with pytest.raises(ConfigError) as caught:
        ReaderConfig.load(path)
    option = re.search(r"""("?(fields|sequences)"?[.\w]*( =|:) \{.*\})""", str(caught.value))[1]
    path.write_text(f"{first}\n{option}\n" if in_toml else f"{first}, {option}}}")
    config = ReaderConfig.load(path)
    assert config.sequences if name == "filter_key" else len(config.fields) == 1


def test_fields_have_hints_of_their_own():
    with pytest.raises(
        ConfigError, match=r"unknown option 'slice'; region=\{1: slice\(64, 192\)\}"
    ):
        Field("data", slice=3)
    with pytest.raises(ConfigError, match=r"unknown option 'mean'; .*scale=0.5"):
        Field("data", mean=3)


def test_what_is_near_an_option_is_told_as_before():
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        ReaderConfig(hdf5_path="x.h5", batchsize=3)
