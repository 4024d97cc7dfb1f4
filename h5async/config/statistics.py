"""Defines `Statistics` of the values of fields, and the files that hold them.

`h5async.measure` computes them; `Field(normalize=...)` takes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import load_file
from h5async.errors import ConfigError, H5AsyncError
from h5async.spelling import toml_value

Per: TypeAlias = Literal["channel", "feature"] | None

_SCHEMA = "h5async statistics 1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldStatistics:
    """Statistics of the values of one field: an item of `Statistics`.

    Arrays have the shape () if `per` is None, (channels,) if it is ``"channel"``, and that of a row
    if it is ``"feature"``. Where there are no values, `mean` and the like are NaN.

    Attributes
    ----------
    path, dtype, per, channel_dim
        The dataset's path, the dtype of the values, how they were grouped, and the number of the
        dataset's dimension that counts channels, for ``per="channel"``.
    count, nan, fill
        int64: the number of values except NaN; of NaN; of values equal to the dataset's fill value
        (None if the field's options change values).
    mean, std, min, max
        float64. `std` divides by the count, as `numpy.std` does. Integers above 2**53 are rounded.
    quantiles
        float64, by the share of values below: ``quantiles["0.5"]`` is the median. None for more
        than 1,024 groups, or sparse rows.
    quantile_error
        With a probability of 0.99, a quantile q lies between those of q - error and q + error; 0
        means that all values were sorted.
    frequencies
        For fields with one integer, string or category per sample: the number of occurrences of
        each, by its text. None for other fields, or with more than 65,536 distinct values.
    lengths
        For ragged fields: the count, mean, std, min and max of their lengths.

    Examples
    --------
    >>> found = h5async.statistics({"hdf5_path": "sample_data/digits.h5"}, per=None)
    >>> labels = found["labels"]
    >>> labels.count, labels.max, labels.frequencies["0"]
    (array(1797), array(9.), 178)
    """

    path: str
    dtype: str
    per: Per = None
    channel_dim: int | None = None
    count: NDArray[Any] | None = None
    nan: NDArray[Any] | None = None
    fill: NDArray[Any] | None = None
    mean: NDArray[Any] | None = None
    std: NDArray[Any] | None = None
    min: NDArray[Any] | None = None
    max: NDArray[Any] | None = None
    quantiles: dict[str, NDArray[Any]] | None = None
    quantile_error: float = 0.0
    frequencies: dict[str, int] | None = None
    lengths: dict[str, float] | None = None

    _counts: ClassVar[tuple[str, ...]] = ("count", "nan", "fill")
    _numbers: ClassVar[tuple[str, ...]] = ("mean", "std", "min", "max")

    def factors(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the scale and offset that make ``(x - mean) / std``; a std of 0 counts as 1.

        ConfigError if there are none, or they are not finite.
        """
        if self.mean is None or self.std is None:
            raise ConfigError(f'"{self.path}" has no mean: its values are {self.dtype}')
        if not (np.isfinite(self.mean).all() and np.isfinite(self.std).all()):
            raise ConfigError(
                f'"{self.path}" has a mean or std that is not finite: no values, or infinite ones'
            )
        scale = 1 / np.where(self.std == 0, 1, self.std)
        return scale, -self.mean * scale

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as lists, without those that are None; NaN and infinities are text."""
        found: dict[str, Any] = {"path": self.path, "dtype": self.dtype}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                found[name] = _listed(value)
            elif value is not None:
                found[name] = value
        if self.quantiles is not None:
            found["quantiles"] = {q: _listed(array) for q, array in self.quantiles.items()}
        return found

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> FieldStatistics:
        """Restore the result of `as_dict`; TypeError or ValueError if it is not one."""
        found = dict(values)
        for names, dtype in ((cls._counts, np.int64), (cls._numbers, np.float64)):
            for name in set(found).intersection(names):
                found[name] = np.asarray(found[name], dtype)
        if "quantiles" in found:
            several = found["quantiles"].items()
            found["quantiles"] = {q: np.asarray(array, np.float64) for q, array in several}
        return cls(**found)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics(Mapping[str, FieldStatistics]):
    """Statistics of fields, by name, as `h5async.statistics` returns them.

    Attributes
    ----------
    fields
        The statistics of each field.
    files, num_samples
        The names of the files that were read, and the number of samples.

    Examples
    --------
    >>> found = h5async.statistics({"hdf5_path": "sample_data/digits.h5"})
    >>> found["labels"].frequencies["3"], float(found["data"].max.max())
    (183, 16.0)
    >>> found.save("stats.json")
    >>> scaled = Field("data", normalize="stats.json")
    """

    fields: Mapping[str, FieldStatistics]
    files: tuple[str, ...] = ()
    num_samples: int = 0

    def __getitem__(self, name: str) -> FieldStatistics:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def of_field(self, name: str, path: str) -> FieldStatistics:
        """Return the statistics of a field by its name or, if there are none, by its path."""
        if name in self.fields:
            return self.fields[name]
        for one in self.fields.values():
            if one.path.strip("/") == path.strip("/"):
                return one
        known = ", ".join(f'{n} ("{one.path}")' for n, one in self.fields.items())
        raise ConfigError(f'there are no statistics of "{path}" ({name}), only of {known}')

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file that `save` writes."""
        return {
            "schema": _SCHEMA,
            "files": list(self.files),
            "num_samples": self.num_samples,
            "fields": {name: one.as_dict() for name, one in self.fields.items()},
        }

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Statistics:
        """Restore the result of `as_dict`; ConfigError if it is not one."""
        if values.get("schema") != _SCHEMA:
            raise ConfigError(f'not a file of statistics: its schema is not "{_SCHEMA}"')
        try:
            fields = {n: FieldStatistics.of_dict(one) for n, one in values["fields"].items()}
            return cls(fields, tuple(values["files"]), values["num_samples"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"damaged statistics: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `Field(normalize=...)` takes: TOML if it ends in .toml, else JSON.

        H5AsyncError if it cannot be written, or would replace an HDF5 file.
        """
        path = Path(path)
        import h5py

        if h5py.is_hdf5(path):
            raise H5AsyncError(f"{path} is an HDF5 file; save the statistics to another one")
        text = _toml(self.as_dict()) if path.suffix.lower() == ".toml" else _json(self.as_dict())
        try:
            path.write_text(f"{text}\n", encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise H5AsyncError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file that `save` wrote; ConfigError if it is not one."""
        try:
            return cls.of_dict(load_file(Path(path)))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.marked}") from error


def _listed(array: NDArray[Any]) -> Any:
    """Return an array as lists, with NaN and infinities as text, which NumPy converts back."""
    if np.isfinite(array).all():
        return array.tolist()
    if array.ndim:
        return list(map(_listed, array))
    return str(array)


def _json(value: Any, indent: str = "") -> str:
    """Return JSON with a key on each line."""
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    deeper = f"{indent}  "
    lines = [f"{deeper}{json.dumps(key)}: {_json(one, deeper)}" for key, one in value.items()]
    return "{{\n{}\n{}}}".format(",\n".join(lines), indent)


def _toml(content: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_value(one)}" for key, one in content.items() if key != "fields"]
    for name, one in content["fields"].items():
        lines += ["", f"[fields.{toml_value(name)}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in one.items()]
    return "\n".join(lines)
