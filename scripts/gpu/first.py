"""Runs the steps that a first GPU is to take, in the order of what they teach.

Names of steps enter; a folder of results for each leaves: below $OUT, or scripts/results/gpu. This
file needs nothing but Python: what a step needs and this Python lacks is installed from wheels/,
without network (`carried.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pack
from carried import ROOT, environment

HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "scripts" / "results" / "gpu"
LIMIT_SECONDS = 540  # of a step, so that a command of ten minutes also has time to install
PACKAGES = "cupy-cuda13x cupy-cuda12x h5async h5py imagecodecs jax nvidia-libnvcomp-cu13".split()
PACKAGES += "nvidia-libnvcomp-cu12 numpy pydantic pytest torch".split()

Command = list[str]


class Step(NamedTuple):
    """A step: how it is called, and what it tells.

    Parameters
    ----------
    commands
        Takes the folder of results, and returns what to run there, one after the other. None: a
        tool is missing.
    seconds
        What it takes at most.
    writes
        Files, besides log.txt.
    """

    name: str
    about: str
    commands: Callable[[Path], list[Command] | None]
    seconds: int = LIMIT_SECONDS
    writes: str = ""


def script(name: str, *arguments: str) -> Callable[[Path], list[Command]]:
    """Return what runs a script of this folder; it writes JSON."""
    return lambda out: [[sys.executable, str(HERE / name), *arguments, "--out", str(out)]]


def probe(out: Path) -> list[Command]:
    smi = [["nvidia-smi"], ["nvidia-smi", "--query"]] if shutil.which("nvidia-smi") else []
    return [*smi, *script("probe.py")(out)]


def tests(selection: str) -> Callable[[Path], list[Command]]:
    """Return what runs those `gpu` tests whose names are selected."""
    options = "-m gpu -rfEsx --durations=10 --timeout=180 --color=no -p no:cacheprovider -v"
    options += " --continue-on-collection-errors"  # other tests may need what is not here
    command = [sys.executable, "-m", "pytest", *options.split(), "-k", selection]
    return lambda out: [command]


def sanitizer(tool: str) -> Callable[[Path], list[Command] | None]:
    def commands(out: Path) -> list[Command] | None:
        folders = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
        found = shutil.which("compute-sanitizer", path=folders)
        if found is None:
            return None
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "100"]
        return [[found, *options, *script("sanitized.py")(out)[0]]]

    return commands


def bench(*arguments: str) -> Callable[[Path], list[Command]]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_gpu.py"), *arguments]
    return lambda out: [[*command, "--out", str(out)]]


DECODES = "decodes or auto_decides or damaged"
FIGURES = "bench_gpu.json, bench_gpu.png"
STEPS = [
    Step(
        "probe",
        "nvidia-smi; then what no simulation tells: rounding, late unregistering, life after a"
        " fault, what a context costs",
        probe,
        240,
        "probe.json",
    ),
    Step(
        "tests",
        "the gpu tests, but those of decoding: order, bits, memory, errors, PyTorch, JAX",
        tests(f"not ({DECODES})"),
    ),
    Step("tests-decode", "the gpu tests of decoding", tests(DECODES)),
    Step(
        "transforms",
        "random casts, permutations and scales against the CPU's bits, negative zeros first",
        script("transforms.py", "--seconds", "120"),
        240,
        "transforms.json",
    ),
    Step(
        "readers",
        "random readers with all options against what was written",
        script("readers.py", "--seconds", "120"),
        240,
        "readers.json",
    ),
    Step(
        "memcheck",
        "compute-sanitizer: does a kernel, or nvCOMP, touch memory that is not its own?",
        sanitizer("memcheck"),
        writes="sanitized.json",
    ),
    Step(
        "racecheck",
        "compute-sanitizer: do the threads of a block race for shared memory?",
        sanitizer("racecheck"),
        writes="sanitized.json",
    ),
    Step(
        "bench-upload",
        "uploads by a plain copy's speed; and the memory that readers take",
        bench("--only", "upload,memory"),
        writes=FIGURES,
    ),
    Step(
        "bench-step",
        "what a training step waits for data",
        bench("--only", "step"),
        writes=FIGURES,
    ),
    *(
        Step(
            f"bench-decode-{dtype}",
            f"decoding of {dtype} on the host and on the GPU",
            bench("--only", "decode", "--dtypes", dtype),
            writes=FIGURES,
        )
        for dtype in ("uint8", "uint16", "float32")
    ),
    Step(
        "bench-cache",
        "readers of which every row is cached",
        bench("--only", "cache"),
        writes=FIGURES,
    ),
    Step(
        "bench-small",
        "batches of small rows, beside a plain loop",
        bench("--only", "small"),
        writes=FIGURES,
    ),
]


def show_steps() -> None:
    print('Steps, in the order of what is learnt; name those to run, or "pack" first.\n')
    for step in STEPS:
        print(f"{step.name:22}{step.about}")
        files = ", ".join(filter(None, ("log.txt", step.writes)))
        print(f"{'':22}at most {step.seconds // 60} minutes; writes {step.name}/{files}\n")
    print(f"Results go below $OUT, or else {RESULTS.relative_to(ROOT)}.")


def machine(env: dict[str, str]) -> list[str]:
    """Return lines that tell date, machine and versions."""
    path = [*env["PYTHONPATH"].split(os.pathsep), *sys.path][::-1]  # the first ones win
    installed = importlib.metadata.distributions(path=path)
    found = {one.metadata["Name"]: one.version for one in installed}
    lines = [
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"machine: {platform.platform()}, {os.cpu_count()} CPUs",
        f"python: {platform.python_version()}",
        *(f"{name}: {found[name]}" for name in PACKAGES if name in found),
    ]
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        lines.insert(2, f"gpu: {asked.stdout.strip() or asked.stderr.strip()}")
    return lines


class Log:
    """What is printed, and kept in a file as it comes."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def say(self, text: str) -> None:
        """Print some lines, and keep them."""
        for stream in (sys.stdout, self._file):
            print(text, file=stream, flush=True)

    def run(self, command: Sequence[str], env: dict[str, str], seconds: float) -> int | None:
        """Run a command; return its exit status, or None where its time was over."""
        self.say(f"$ {' '.join(command)}")
        stopped = threading.Event()
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # so that what it started ends with it
        ) as process:

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            def stop() -> None:
                stopped.set()
                kill()

            timer = threading.Timer(seconds, stop)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self.say(line.rstrip("\n"))
                status = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:  # we were interrupted
                    kill()
        return None if stopped.is_set() else status


def run_step(step: Step, folder: Path, env: dict[str, str]) -> str:
    """Run a step; return how it ended."""
    out = folder / step.name
    out.mkdir(parents=True, exist_ok=True)
    begin = datetime.datetime.now(datetime.UTC)
    with (out / "log.txt").open("w") as file:
        log = Log(file)
        log.say("\n".join([f"step: {step.name}", *machine(env), ""]))
        ended = "well"
        commands = step.commands(out)
        if commands is None:
            ended = "left out: compute-sanitizer is not on this machine"
        for command in commands or ():
            passed = (datetime.datetime.now(datetime.UTC) - begin).total_seconds()
            status = log.run(command, env, max(1, step.seconds - passed))
            if status is None:
                ended = f"stopped: it took more than {step.seconds} seconds"
                break
            if status:
                ended = f"exit status {status}"
        passed = (datetime.datetime.now(datetime.UTC) - begin).total_seconds()
        log.say(f"\n{step.name} ended: {ended} ({passed:.0f} seconds)")
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the steps that a first GPU is to take.")
    parser.add_argument("steps", nargs="*", help='names of steps, or "pack"; none: list them')
    names = parser.parse_args().steps
    if not names:
        show_steps()
        return 0
    if names == ["pack"]:
        pack.pack()
        return 0
    steps = {step.name: step for step in STEPS}
    if unknown := sorted(set(names) - set(steps)):
        parser.error(f"no step is called {unknown[0]}; there are {', '.join(steps)}")
    folder = Path(os.environ.get("OUT") or RESULTS)
    env = environment()
    ends = {name: run_step(steps[name], folder, env) for name in names}
    print("\n".join(f"{name}: {end}" for name, end in ends.items()))
    return int(any(not end.startswith(("well", "left out")) for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
