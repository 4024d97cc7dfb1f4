"""The plan for a first GPU, without one: wheels that are trimmed, steps that end in each way."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5async import AsyncReader

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _scripts_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))


@pytest.fixture
def first():
    return importlib.import_module("first")


@pytest.mark.slow
def test_no_gpu_is_seen_where_none_is_asked_for(tmp_path):
    """Also on a machine that has one: these tests assume the CPU."""
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(8)
    with AsyncReader(hdf5_path=path, labels_field=None) as reader:
        assert reader.device == "cpu"
    code = "import sys; from h5async import AsyncReader as A\n"
    code += "print(A(hdf5_path=sys.argv[1], labels_field=None).device)"
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "cpu\n"


@pytest.mark.slow
def test_steps_are_listed_in_their_order():
    done = subprocess.run(
        [ROOT / "scripts" / "first_gpu"], capture_output=True, text=True, timeout=60, check=True
    )
    at = [done.stdout.index(f"\n{name} ") for name in ("probe", "tests", "memcheck", "bench-step")]
    assert at == sorted(at)


@pytest.mark.slow
def test_an_unknown_step_is_refused():
    done = subprocess.run(
        [ROOT / "scripts" / "first_gpu", "prob"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no step is called prob" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "seconds", "ended"),
    [
        ("print('found')", 60, "well"),
        ("print('found'); raise SystemExit(3)", 60, "exit status 3"),
        ("print('found', flush=True); import threading; threading.Event().wait()", 2, "stopped"),
        (None, 60, "left out"),
    ],
)
def test_however_a_step_ends_its_log_tells(first, tmp_path, code, seconds, ended):
    commands = None if code is None else [[sys.executable, "-c", code]]
    step = first.Step("look", "looks", lambda out: commands, seconds)
    assert first.run_step(step, tmp_path, os.environ | {"PYTHONPATH": ""}).startswith(ended)
    log = (tmp_path / "look" / "log.txt").read_text()
    assert log.startswith("step: look\ndate: ")
    assert "numpy: " in log
    assert f"look ended: {ended}" in log
    assert ("\nfound\n" in log) == (code is not None)


@pytest.mark.slow
def test_a_trimmed_wheel_holds_the_library_and_can_be_installed(tmp_path):
    wheel = tmp_path / "nvidia_libnvcomp_cu13-6.0-py3-none-any.whl"
    info = "nvidia_libnvcomp_cu13-6.0.dist-info"
    contents = {
        "nvidia/libnvcomp/__init__.py": "",
        "nvidia/libnvcomp/lib64/libnvcomp.so.6": "the library",
        "nvidia/libnvcomp/lib64/libnvcomp_cpu.so.6": "another",
        "nvidia/libnvcomp/bin/nvlzcat": "a program",
        "nvidia/libnvcomp/include/nvcomp.h": "a header",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nvidia-libnvcomp-cu13\nVersion: 6.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "nvidia/libnvcomp/bin/nvlzcat,,\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    importlib.import_module("pack").trim(wheel)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    site = tmp_path / "site"
    subprocess.run([*pip, "--target", site, wheel], check=True, timeout=100, capture_output=True)
    files = {str(p.relative_to(site)) for p in site.glob("nvidia/**/*") if p.suffix != ".pyc"}
    found = {name for name in files if (site / name).is_file()}
    assert found == {"nvidia/libnvcomp/__init__.py", "nvidia/libnvcomp/lib64/libnvcomp.so.6"}


def test_a_wheel_without_the_library_is_refused(tmp_path):
    wheel = tmp_path / "nvidia_libnvcomp_cu13-9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia_libnvcomp_cu13-9.0.dist-info/RECORD", "")
    with pytest.raises(SystemExit, match="holds no libnvcomp"):
        importlib.import_module("pack").trim(wheel)


def test_what_is_packed_is_what_the_project_needs():
    wanted = importlib.import_module("pack").requirements()
    names = {one.partition(">=")[0] for one in wanted}
    assert names >= {"imagecodecs", "pydantic", "typer", "pytest", "nvidia-libnvcomp-cu13"}
    assert "hdf5plugin" not in names


@pytest.mark.gpu
@pytest.mark.simulated_gpu
@pytest.mark.parametrize("name", ["transforms", "readers"])
def test_a_step_runs_on_a_gpu_that_cannot_run_the_benchmark(tmp_path, name):
    """Its kernel reads a clock that is not simulated."""
    paths = [str(ROOT / "scripts"), os.environ["PYTHONPATH"]]
    script = ROOT / "scripts" / "gpu" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path, "--seconds", "2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads((tmp_path / f"{name}.json").read_text())["findings"]
    assert findings["compared" if name == "transforms" else "batches"] > 0
