"""`h5async read`: streams epochs, and says how fast that was."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import AsyncReader
from h5async.bench import require_batches
from h5async.cli.documents import Json, field_facts, print_document
from h5async.cli.options import reader_config, takes_reader
from h5async.cli.progress import REFRESH_SECONDS, opening, progress_bar
from h5async.cli.text import files_text, method_text, safe


@takes_reader
def read(
    epochs: Annotated[int, typer.Option(min=1, help="How often to read everything.")] = 1,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Read FILE in batches, and say how fast that was."""
    with opening():
        reader = AsyncReader(reader_config(typed))
    with reader:
        require_batches(reader)
        tally = stream(reader, epochs)
        if as_json:
            print_document("read", _content(reader, epochs, tally))
        else:
            typer.echo(_summary(reader, epochs, tally))


@dataclass(slots=True)
class Tally:
    """What was read so far, and how long it took."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    @property
    def speed(self) -> str:
        """Samples and decoded bytes a second."""
        seconds = self.seconds or float("inf")
        return f"{self.samples / seconds:,.0f} samples/s, {self.nbytes / seconds / 1e9:.3g} GB/s"


def stream(reader: AsyncReader, epochs: int) -> Tally:
    """Read epochs by a new reader, counting batches, bytes and the time spent waiting for them."""
    tally = Tally()
    with progress_bar("batches, {task.description}") as progress:
        task = progress.add_task(tally.speed, total=epochs * len(reader))
        began = shown = perf_counter()
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
                tally.samples += batch.size
                if now - shown > REFRESH_SECONDS:
                    shown, tally.nbytes = now, reader.stats().nbytes
                    progress.update(task, completed=tally.batches, description=tally.speed)
                    progress.refresh()
    tally.nbytes = reader.stats().nbytes
    return tally


def _content(reader: AsyncReader, epochs: int, tally: Tally) -> dict[str, Any]:
    """Return what `docs/command-line.md` says of the document of `h5async read`."""
    layouts = reader.layouts.items()
    return {
        "files": reader.config.files,
        "fields": [field_facts(name, layout) for name, layout in layouts],
        "epochs": epochs,
        "device": reader.device,
        **asdict(tally),
        "stats": reader.stats(),
        "sentence": str(reader.stats()),
    }


def _summary(reader: AsyncReader, epochs: int, tally: Tally) -> str:
    """Say what was read, how, and how fast: a line for each thing."""
    waited = f"{tally.waited_seconds:.3f} s of {tally.seconds:.3f} s"
    share = tally.waited_seconds / tally.seconds if tally.seconds else 0.0
    lines = [
        ("file", files_text(reader.config.files)),
        *(
            ("field", f'{name} = "{layout.path}" ({method_text(layout)})')
            for name, layout in reader.layouts.items()
        ),
        ("epochs", f"{epochs:,}"),
        ("batches", f"{tally.batches:,}"),
        ("samples", f"{tally.samples:,}"),
        ("decoded", decimal(tally.nbytes)),
        ("device", reader.device),
        ("speed", tally.speed),
        ("waited", f"{waited} ({share:.1%}; this loop does nothing else)"),
        ("limit", str(reader.stats())),
    ]
    return "\n".join(f"{name:<9}{safe(text)}" for name, text in lines)
