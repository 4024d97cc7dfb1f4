"""Defines the base of all configurations: frozen, documented, with messages that name the option.

For a name that other loaders use, a hint suggests the option, spelled as in the place where the
name was typed: as a keyword, in a configuration file, or on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as Bound

from h5async.config.values import shown
from h5async.errors import ConfigError
from h5async.spelling import Spell, as_keyword, named
from h5async.system.describing import OnAccess, describe, descriptions
from h5async.system.interruptions import interruption, raise_again

REQUIRED: Any = ...
_ANCESTOR_NAMES = {"nthread": "num_threads", "njob": "prefetch", "cuda": "device"}
_RAISES = """\
Raises
------
ConfigError
    If an option is unknown or its value is invalid.

"""

Model = TypeVar("Model", bound=BaseModel)


def _add_descriptions(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, description in descriptions(model).items():
        schema["properties"][name]["description"] = description


class Frozen(BaseModel):
    """A configuration: unknown options and invalid values raise `ConfigError`."""

    keywords: ClassVar[tuple[type, ...]] = ()  # see `documented`

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        defer_build=True,
        json_schema_extra=_add_descriptions,
    )

    def __init__(self, **options: Any) -> None:
        self.check_names(options)
        try:
            super().__init__(**options)
        except ValidationError as error:
            for item in error.errors():
                found = interruption(item.get("ctx", {}).get("error"))
                if found is not None:
                    raise_again(found)
            raise ConfigError(_message(error)) from None

    @classmethod
    def check_names(cls, names: Iterable[str], spell: Spell = as_keyword) -> None:
        """Raise `ConfigError` unless names are options; `spell` formats suggested options."""
        for name in names:
            if name not in cls.model_fields:
                raise ConfigError(f"unknown option {name!r}; {cls.instead_of(name, spell)}")

    @classmethod
    def instead_of(cls, name: str, spell: Spell) -> str:
        """Return a suggestion for an unknown name: its meaning elsewhere, or a similar name."""
        import difflib

        known = list(cls.model_fields)
        expected = hint_for(name, known, spell)
        if expected is not None:
            return expected
        near = _ANCESTOR_NAMES.get(name)
        if near not in known:
            snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()
            near = next(iter(difflib.get_close_matches(snake, known, n=1, cutoff=0.5)), None)
        return f"did you mean {near!r}?" if near else f"options are: {', '.join(known)}"


def _absent(_: type) -> NoReturn:
    raise AttributeError


# Hides pydantic's deprecated method, because `copy` may be the name of an option.
Frozen.copy = OnAccess(_absent)  # type: ignore[assignment,method-assign]


@dataclass(frozen=True)
class Words:
    """Texts about an option: metadata of its type, which pydantic ignores.

    `shell` is its description on the command line, if different; `default_text` describes the
    default where its value would not be clear; `values` is the syntax of its values where the type
    would not be: ``"auto|cpu|cuda"``.
    """

    default_text: str = ""
    values: str = ""
    shell: str = ""


def option(default: Any, description: str = "", **words: str) -> Any:
    """Declare an option, with its default or `REQUIRED`, and `Words`.

    `description` is for options without a docstring; see `documented`.
    """
    declared = Bound(default, description=description or None)
    declared.metadata.append(Words(**words))
    return declared


def documented(*keywords: type) -> Callable[[type[Model]], type[Model]]:
    """Add sections with the descriptions of all options, and with errors, to a class's docstring.

    The descriptions are docstrings in `keywords`: `TypedDict`s of the options, for editors.
    """

    def add(model: type[Model]) -> type[Model]:
        cast("Any", model).keywords = keywords
        describe(model, "Parameters", lambda: model, "Examples\n", _RAISES)
        return model

    return add


def _message(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        names = [str(part) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        if message.startswith("Input should "):  # pydantic says this for "must"
            message = f"must {message.removeprefix('Input should ')}"
        if not names:
            lines.append(message)
        elif item["type"] == "missing":
            lacks = " is required" if len(names) == 1 else ": must have more values"
            lines.append(f"{named(names[0])}{lacks}")
        else:
            inner = "".join(f".{name}" for name in names[1:] if name.isidentifier())
            where = f"{named(names[0])}{inner}"
            line = f"{where}: {message[0].lower()}{message[1:]}"
            is_told = isinstance(item.get("ctx", {}).get("error"), ConfigError)
            lines.append(line if is_told else f"{line}, found {shown(item['input'])}")
    return "; ".join(dict.fromkeys(lines))


# --- names that other loaders use -----------------------------------------------------------------


class _Call(dict[str, Any]):
    """Options of an object, which is a table in files and a call in Python."""

    def __init__(self, called: str, **options: Any) -> None:
        super().__init__(options)
        self._called = called

    def __repr__(self) -> str:
        given = [as_keyword(name, (value,)) for name, value in self.items() if name != "kind"]
        return f"{self._called}({', '.join(given)})".replace("(path=", "(")


class _Hint(NamedTuple):
    """A suggestion for an unknown name; ``{}`` stands for an option with an example value.

    `otherwise` is the hint for configurations without that option.
    """

    text: str
    option: str
    value: Any = None
    otherwise: _Hint | None = None


def _of_field(path: str, text: str = "it is an option of a field", **options: Any) -> _Hint:
    field = _Call(f"{options.get('kind', '').capitalize()}Field", path=path, **options)
    return _Hint(f"{text}: {{}}", "fields", {path: field})


_STEPS = _of_field("x", "steps of a Field say which rows each sample consists of", steps=range(10))
_REGION = _of_field(
    "x",
    "region of a Field reads a part of each row, and crop one at a random place",
    region={1: slice(64, 192)},
)
_COMPUTE = _Hint(
    "a Field of `fields` has dtype, scale and offset: values are delivered as x * scale + offset;"
    " {} can compute anything else",
    "postprocess",
    "module:function",
)
_SKIP = _Hint(
    'damaged samples of any field are left out by an option of the reader: on_error="skip"', "path"
)
_HINTS = {
    "subset split train_size test_size validation_split": _Hint(
        "{} selects the samples of an epoch, and so does a Split", "indices", "1000:"
    ),
    "transform transforms target_transform augment map collate collate_fn": _Hint(
        "{} is called with the arrays of a whole batch", "postprocess", "module:function"
    ),
    "num_workers n_workers num_proc worker_count": _Hint(
        "threads do the work of worker processes, and num_threads is their number; for a"
        " postprocess that holds the GIL, {} lets several processes fill batches side by side",
        "workers",
        4,
    ),
    "normalize normalise mean std": _Hint(
        "values are delivered as x * scale + offset: {}", "scale", 0.5, _COMPUTE
    ),
    "mask_and_scale set_auto_maskandscale": _Hint(
        "values are unpacked by the attributes of their dataset: {}", "decode_cf", True
    ),
    "window buffer_size shuffle_buffer": _Hint(
        "{} mixes the samples of several chunks, and window_bytes limits them", "shuffle", "window"
    ),
    "seq_length seq_len sequence_length frame_stack num_frames num_steps n_steps window_size"
    " window_length n_steps_input n_steps_output n_obs_steps obs_horizon action_horizon"
    " pred_horizon horizon context_length episode_length episode_len": _Hint(
        "{} delivers the row of each sample and the nine after it", "steps", range(10), _STEPS
    ),
    "padding pad_seq_length pad_frame_stack": _Hint(
        "{} repeats the first or last row of a sequence", "pad", "edge", _STEPS
    ),
    "get_pad_mask": _Hint(
        "{} names the field of a batch that tells padded steps from others",
        "pad_mask",
        "mask",
        _STEPS,
    ),
    "filter_by_attribute filter_key hdf5_filter_key": _Hint(
        "{} reads only the groups that a dataset names",
        "sequences",
        _Call("Sequences", groups="data/demo_*", only="mask/train"),
    ),
    "replacement class_weights sample_weights balanced": _Hint(
        "{} draws samples with replacement", "weights", "balanced"
    ),
    "max_tokens max_token_count max_tokens_per_batch batch_tokens tokens_per_batch max_frames"
    " max_batch_length": _Hint(
        "{} fills batches with samples of varying lengths up to a number of values",
        "batch_values",
        65536,
    ),
    "group_by_length bucket_by_length bucket_size num_buckets buckets": _Hint(
        "{} groups samples of similar length", "bucket", 8
    ),
    "persistent_workers prefetch_factor multiprocessing_context": _Hint(
        "there are no worker processes to keep; {} is the number of batches in memory",
        "prefetch",
        4,
    ),
    "class_to_idx classes class_names label_encoder": _of_field("labels", categories=True),
    "dtype scale offset axes channel_dim decode_cf steps pad pad_mask per categories": _of_field(
        "x", dtype="float32", steps=range(4)
    ),
    "region": _REGION,
    "slice slices roi hyperslab subset_of_rows": _Hint(
        "{} reads a part of each row", "region", {1: slice(64, 192)}, _REGION
    ),
    "file files filename filenames file_path file_paths path paths h5_path": _Hint(
        "the files are given as {}", "hdf5_path", "train.h5"
    ),
    "offsets offsets_kind pad_to": _of_field(
        "x", kind="ragged", offsets="ends", offsets_kind="ends"
    ),
    "dense columns missing": _of_field("X", kind="sparse", dense=True, columns=["GAPDH", "CD3E"]),
    "crop random_crop patch patch_size": _of_field(
        "x",
        "crop of a Field reads a part of each row at a random place; ImageField has its own",
        crop=64,
    ),
    "crop_scale crop_ratio flip interpolation decode": _of_field(
        "jpeg", kind="image", size=(224, 224), flip=True
    ),
    "channels mono sample_rate sampling_rate sr": _of_field(
        "flac", kind="audio", sample_rate=16000
    ),
    "ignore_errors skip_errors skip_bad skip_corrupt skip_invalid skip_damaged error_handling"
    " errors handler on_bad_sample warn_and_continue": _Hint(
        "{} leaves out samples and files that are damaged, and max_skipped limits them",
        "on_error",
        "skip",
        _SKIP,
    ),
    "on_error max_skipped": _SKIP,
    "generator random_state random_seed": _Hint("the order depends only on {}", "seed", 0),
}
_BY_NAME = {name: hint for names, hint in _HINTS.items() for name in names.split()}


def hint_for(name: str, known: Sequence[str], spell: Spell) -> str | None:
    """Return the suggestion for an unknown name, if any, with an option written by `spell`."""
    hint = _BY_NAME.get(name.lstrip("-").replace("-", "_").lower())
    while hint is not None and hint.option not in known:
        hint = hint.otherwise
    return None if hint is None else hint.text.format(spell(hint.option, (hint.value,)))
