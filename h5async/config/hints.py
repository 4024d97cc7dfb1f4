"""Suggests the option for a name that other loaders use.

A hint spells the option as in the place where the name was typed: as a keyword, in a configuration
file, or on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from h5async import spelling

Where = spelling.Where | Literal["shell"]


class _Hint(NamedTuple):
    """A sentence instead of an unknown name; ``{}`` stands for an option with an example.

    `spelled` has the option with its value, by place, unless it is just the one after the other.
    `otherwise` is the hint where the option is not known.
    """

    text: str
    option: str
    value: str | int | float = ""
    spelled: Mapping[Where, str] = {}
    otherwise: _Hint | None = None


def _of_field(keyword: str, toml: str, name: str = "x", text: str = "") -> _Hint:
    """Return a hint at an option of a field, which the command line has only in a file."""
    in_file = f"fields.{name} = {{{toml}}}"
    keyword = f'fields={{"{name}": {keyword}}}'
    in_shell = f"{in_file} in the file of --config"
    spelled: dict[Where, str] = {"keyword": keyword, "toml": in_file, "shell": in_shell}
    return _Hint(f"{text or 'it is an option of a field'}: {{}}", "fields", spelled=spelled)


_STEPS = _of_field(
    'Field("x", steps=range(0, 10))',
    'path = "x", steps = "0:10"',
    text="steps of a Field say which rows each sample consists of",
)
_REGION = _of_field(
    'Field("x", region={1: slice(64, 192)})',
    'path = "x", region = {1 = "64:192"}',
    text="region of a Field reads a part of each row, and crop one at a random place",
)
_COMPUTE = _Hint(
    "a Field of `fields` has dtype, scale and offset: values are delivered as x * scale + offset;"
    " {} can compute anything else",
    "postprocess",
    "module:function",
)
_SKIP = _Hint(
    "damaged samples of any field are left out by an option of the reader: {}",
    "path",
    spelled={"keyword": 'on_error="skip"', "toml": 'on_error = "skip"'},
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
        "values are delivered as x * scale + offset: {}", "scale", 0.5, otherwise=_COMPUTE
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
        "{} delivers the row of each sample and the nine after it",
        "steps",
        spelled={"keyword": "steps=range(0, 10)", "toml": 'steps = "0:10"'},
        otherwise=_STEPS,
    ),
    "padding pad_seq_length pad_frame_stack": _Hint(
        "{} repeats the first or last row of a sequence", "pad", "edge", otherwise=_STEPS
    ),
    "get_pad_mask": _Hint(
        "{} names the field of a batch that tells padded steps from others",
        "pad_mask",
        "mask",
        otherwise=_STEPS,
    ),
    "filter_by_attribute filter_key hdf5_filter_key": _Hint(
        "{} reads only the groups that a dataset names",
        "sequences",
        spelled={
            "keyword": 'sequences=Sequences(groups="data/demo_*", only="mask/train")',
            "toml": 'sequences = {groups = "data/demo_*", only = "mask/train"}',
            "shell": "--sequences \"{groups = 'data/demo_*', only = 'mask/train'}\"",
        },
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
    "class_to_idx classes class_names label_encoder": _of_field(
        'Field("labels", categories=True)', 'path = "labels", categories = true', "labels"
    ),
    "dtype scale offset axes channel_dim decode_cf steps pad pad_mask per categories": _of_field(
        'Field("x", dtype="float32", steps=range(4))',
        'path = "x", dtype = "float32", steps = "0:4"',
    ),
    "region": _REGION,
    "slice slices roi hyperslab subset_of_rows": _Hint(
        "{} reads a part of each row",
        "region",
        spelled={"keyword": "region={1: slice(64, 192)}", "toml": 'region = {1 = "64:192"}'},
        otherwise=_REGION,
    ),
    "file files filename filenames file_path file_paths path paths h5_path": _Hint(
        "{} names the files",
        "hdf5_path",
        "train.h5",
        {"shell": "an argument, such as train.h5,"},
    ),
    "offsets offsets_kind pad_to": _of_field(
        'RaggedField("x", offsets="ends", offsets_kind="ends")',
        'path = "x", kind = "ragged", offsets = "ends", offsets_kind = "ends"',
    ),
    "dense columns missing": _of_field(
        'SparseField("X", dense=True, columns=["GAPDH", "CD3E"])',
        'path = "X", kind = "sparse", dense = true, columns = ["GAPDH"]',
    ),
    "crop random_crop patch patch_size": _of_field(
        'Field("x", crop=64)',
        'path = "x", crop = 64',
        text="crop of a Field reads a part of each row at a random place; ImageField has its own",
    ),
    "crop_scale crop_ratio flip interpolation decode": _of_field(
        'ImageField("jpeg", size=(224, 224), flip=True)',
        'path = "jpeg", kind = "image", size = [224, 224], flip = true',
        "image",
    ),
    "channels mono sample_rate sampling_rate sr": _of_field(
        'AudioField("flac", sample_rate=16000)',
        'path = "flac", kind = "audio", sample_rate = 16000',
        "audio",
    ),
    "ignore_errors skip_errors skip_bad skip_corrupt skip_invalid skip_damaged error_handling"
    " errors handler on_bad_sample warn_and_continue": _Hint(
        "{} leaves out samples and files that are damaged, and max_skipped limits them",
        "on_error",
        "skip",
        otherwise=_SKIP,
    ),
    "on_error max_skipped": _Hint("", "", otherwise=_SKIP),
    "generator random_state random_seed": _Hint("the order depends only on {}", "seed", 0),
}
_BY_NAME = {name: hint for names, hint in _HINTS.items() for name in names.split()}


def hint_for(name: str, known: Sequence[str], where: Where = "keyword") -> str | None:
    """Return the suggestion for an unknown name typed in `where`, if any."""
    hint = _BY_NAME.get(name.lstrip("-").replace("-", "_").lower())
    while hint is not None and hint.option not in known:
        hint = hint.otherwise
    return None if hint is None else hint.text.format(_spelled(hint, where))


def _spelled(hint: _Hint, where: Where) -> str:
    if where in hint.spelled:
        return hint.spelled[where]
    if where == "shell":
        return f"--{hint.option.replace('_', '-')} {hint.value}"
    if where == "keyword":
        return f"{hint.option}={hint.value!r}"
    return spelling.in_file(where)(hint.option, (hint.value,))
