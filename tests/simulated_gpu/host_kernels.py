"""A kernel that NVRTC has compiled enters; a library leaves that runs it on the CPU.

g++ compiles the same source behind ``host_kernels.h``, which makes plain variables of threadIdx and
its kin, and plain functions of the few built-ins that our kernels and CuPy's elementwise ones use.
Threads run one after the other, in an order of blocks and threads that changes from launch to
launch: shared memory and ``__syncthreads`` there are not. What is built is kept from run to run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from simulated_gpu import folder

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O2", "-w", "-fpermissive", "-shared", "-fPIC", "-ffp-contract=off")
FLAGS += ("-fno-strict-aliasing", "-fvisibility=hidden", "-x", "c++", "-")

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\(\d+\)\s*)?(\w+)\s*\('
)

# CuPy's own class for float16, which it has for old compilers, needs these two.
_HALF_BEFORE = """
struct half;
static unsigned short __half_as_ushort(const half &);
static half __ushort_as_half(unsigned short);
"""
_HALF_AFTER = """
static unsigned short __half_as_ushort(const half &value)
{
    unsigned short bits;
    memcpy(&bits, &value, 2);
    return bits;
}
static half __ushort_as_half(unsigned short bits)
{
    half value;
    memcpy((void *)&value, &bits, 2);
    return value;
}
"""

_LAUNCHER = """
EXPORT const size_t {name}_sizes[] = {{{sizes}}};
EXPORT void {name}_launch(const unsigned *grid, const unsigned *block, unsigned order, void **p)
{{
    unsigned long long blocks = (unsigned long long)grid[0] * grid[1] * grid[2];
    gridDim = {{grid[0], grid[1], grid[2]}};
    blockDim = {{block[0], block[1], block[2]}};
    for (unsigned long long i = 0; i < blocks; i++) {{
        unsigned long long at = (order + (order & 1 ? i : blocks - i)) % blocks;
        blockIdx = {{(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                    (unsigned)(at / grid[0] / grid[1])}};
        for (unsigned z = 0; z < block[2]; z++)
            for (unsigned y = 0; y < block[1]; y++)
                for (unsigned x = 0; x < block[0]; x++) {{
                    threadIdx = {{order & 2 ? x : block[0] - 1 - x, y, z}};
                    {name}({arguments});
                }}
    }}
}}
"""


def image_of(source: str, options: tuple[str, ...]) -> bytes:
    """Return what is loaded in place of NVRTC's result."""
    macros = [option for option in options if option.startswith("-D")]
    return json.dumps([source, macros]).encode() + b"\0"


@functools.cache
def build(image: str, name: str) -> tuple[ctypes.CDLL, int]:
    """Return the library of an image's kernels, and how many parameters one of them has.

    Raises
    ------
    RuntimeError
        If g++ refuses it.
    """
    source, macros = json.loads(image)
    kernels = {found[1]: _types(source, found.end()) for found in _KERNEL.finditer(source)}
    path = folder() / "kernels" / f"{hashlib.sha256((_SALT + image).encode()).hexdigest()}.so"
    if not path.exists():
        _compile(_code(source, kernels), macros, path)
    return ctypes.CDLL(str(path)), len(kernels[name])


def _code(source: str, kernels: dict[str, list[str]]) -> str:
    has_half = "float16.cuh" in source
    launchers = [
        _LAUNCHER.format(
            name=name,
            sizes=", ".join(f"sizeof({kind})" for kind in kinds),
            arguments=", ".join(f"*({kind} *)p[{i}]" for i, kind in enumerate(kinds)),
        )
        for name, kinds in kernels.items()
    ]
    around = (_HALF_BEFORE, _HALF_AFTER) if has_half else ("", "")
    return "\n".join((around[0], source, around[1], *launchers))


def _types(source: str, begin: int) -> list[str]:
    """Return the types of a kernel's parameters, the list of which begins there."""
    depth, text, found = 0, "", []
    for letter in source[begin:]:
        if letter in ",)" and depth == 0:
            found.append(text)
            text = ""
            if letter == ")":
                break
            continue
        depth += (letter in "(<") - (letter in ")>")
        text += letter
    spelled = [re.sub(r"__restrict__|\w+\s*$", "", one).strip() for one in found]
    return [f"std::remove_const<{kind}>::type" for kind in spelled if kind]


def _compile(code: str, macros: list[str], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        ["g++", "-include", HERE / "host_kernels.h", *_headers(), *macros, "-o", made, *FLAGS],
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError("g++ refuses a kernel")
    os.replace(made, path)


def _headers() -> list[str]:
    import cupy

    return [f"-I{HERE / 'include'}", f"-I{Path(cupy.__file__).parent / '_core' / 'include'}"]


_SALT = (HERE / "host_kernels.h").read_text() + Path(__file__).read_text()
