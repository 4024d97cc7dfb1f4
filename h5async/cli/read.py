"""`h5async read`: streams epochs, and reports the speed and what limits the reader."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from types import FrameType
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async.cli.bench import require_batches
from h5async.cli.datasetfacts import method_text, methods_of
from h5async.cli.options import reader_config, takes_reader
from h5async.cli.output import (
    Json,
    counting,
    files_text,
    limit_text,
    opening,
    print_json,
    resolved,
    safe,
)
from h5async.reader.asyncreader import AsyncReader
from h5async.samples.samplearrays import SampleArrays

_CTRL_C, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as in shells


class _TerminatedError(SystemExit):
    """SIGTERM was received."""


@takes_reader
def read(
    epochs: Annotated[int, typer.Option(min=1, help="How often to read everything.")] = 1,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Record what each thread does, for Perfetto and chrome://tracing.",
        ),
    ] = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Read FILE in batches, and report the speed and what limits the reader.

    After Ctrl-C or SIGTERM, it reports what it has read so far.
    """
    with opening():
        reader = AsyncReader(reader_config(typed))
    with reader:
        require_batches(reader)
        tally, code = Tally(), 0
        noted = reader.trace(resolved(trace)) if trace else nullcontext()
        try:
            with stopping_by_sigterm(), noted:
                stream(reader, epochs, tally)
        except KeyboardInterrupt:
            code = _CTRL_C
        except _TerminatedError:
            code = _TERMINATED
        if not tally.batches:
            raise typer.Exit(code)  # there is nothing to report
        tally.nbytes = reader.stats().nbytes
        if as_json:
            print_json("read", _content(reader, tally, code))
        else:
            typer.echo(_summary(reader, epochs, tally))
    raise typer.Exit(code)


@contextmanager
def stopping_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a block, unless the program already handles it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError(_TERMINATED)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(slots=True)
class Tally:
    """The amount read so far, and the time it took."""

    epochs: int = 0
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)  # of samples, per field

    @property
    def speed(self) -> str:
        """Samples and decoded bytes per second."""
        seconds = self.seconds or float("inf")
        return f"{self.samples / seconds:,.0f} samples/s, {self.nbytes / seconds / 1e9:.3g} GB/s"


def stream(reader: AsyncReader, epochs: int, tally: Tally) -> None:
    """Read epochs with a new reader."""

    def speed() -> str:
        tally.nbytes = reader.stats().nbytes
        return tally.speed

    with counting("batches, ") as show:
        total, began = epochs * len(reader), perf_counter()
        show(0, total, speed)
        for _ in range(epochs):
            batches = iter(reader)
            while True:
                asked = perf_counter()
                batch = next(batches, None)
                now = perf_counter()
                tally.waited_seconds += now - asked
                tally.seconds = now - began
                if batch is None:
                    break
                tally.batches += 1
                if tally.batches == 1:
                    tally.forms = {name: _sample_form(batch[name]) for name in batch.keys()}
                tally.samples += batch.size
                show(tally.batches, total, speed)
            tally.epochs += 1


def _sample_form(batch: Any) -> dict[str, Any]:
    """Return the form of a field's sample, as delivered; None stands for lengths that vary."""
    is_array = not isinstance(batch, SampleArrays)
    kind, shape = (
        ("array", batch.shape[1:]) if is_array else (type(batch).__name__, batch.sample_shape)
    )
    return {"kind": kind, "shape": shape, "dtype": str(batch.dtype)}


def _field_facts(reader: AsyncReader, name: str, form: dict[str, Any] | None) -> dict[str, Any]:
    layout, typed = reader.layouts[name], reader.config.batch_fields.get(name)
    is_direct = layout.fallback_reason is None
    inner = form["shape"] if form is not None and form["kind"] != "array" else ()
    return {
        "name": name,
        "path": layout.path if typed is None else typed.path.strip("/"),
        "shape": (layout.sample_count, *inner) if layout.is_ragged else layout.shape,
        "dtype": str(layout.dtype),
        "sample": form,
        "read": "direct" if is_direct else "h5py",
        "by": methods_of(layout)[0] if is_direct else (),
        "reason": layout.fallback_reason,
    }


def _content(reader: AsyncReader, tally: Tally, code: int) -> dict[str, Any]:
    totals = asdict(tally)
    forms = totals.pop("forms")
    return {
        "files": reader.config.files,
        "fields": [_field_facts(reader, name, forms.get(name)) for name in reader.layouts],
        "device": reader.device,
        **totals,
        "interrupted": bool(code),
        "stats": reader.stats().as_dict(),
        "sentence": f"{tally.speed}; {limit_text(reader.stats())}",
    }


def _summary(reader: AsyncReader, epochs: int, tally: Tally) -> str:
    of_all = "" if tally.epochs == epochs else f" of {epochs:,}: interrupted"
    lines = [
        ("file", files_text(reader.config.files)),
        *(
            ("field", f'{name} = "{layout.path}" ({method_text(layout)})')
            for name, layout in reader.layouts.items()
        ),
        ("epochs", f"{tally.epochs:,}{of_all}"),
        ("batches", f"{tally.batches:,}"),
        ("samples", f"{tally.samples:,}"),
        ("decoded", decimal(tally.nbytes)),
        ("device", reader.device),
        ("speed", tally.speed),
        ("limit", limit_text(reader.stats()).removeprefix("the limit is ")),
    ]
    return "\n".join(f"{name:<9}{safe(text)}" for name, text in lines)
