"""Builds an operator of kernels/cuda with nvcc at first use, for the device at hand, and loads it.

Promises: as build.py. Environment read here: CUDACXX (the compiler), CUDA_HOME and CUDA_PATH (where the toolkit lies).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.build import (
    Compiler,
    Kernels,
    NoCompiler,
    Recipe,
    cache_folder,
    call,
    load_recipe,
    source_folder,
    with_headers,
)

HEAD_SIZES = (16, 32, 48, 64, 80, 96, 112, 128)
# The state before every 16th token is saved: a chunk's inputs fit in shared memory beside those of other blocks.
CHUNK_LENGTH = 16
FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC", f"-DCHUNK_LENGTH={CHUNK_LENGTH}")


def load_cuda_operator(
    name: str, head_size: int, capability: tuple[int, int], check: Callable[[ctypes.CDLL], None]
) -> Kernels:
    """The operator of kernels/cuda/NAME.cu for one head size (0: it has none) and compute capability.

    NoCompiler or KernelError if that cannot be.
    """
    nvcc = find_nvcc()
    instructions = f"sm_{capability[0]}{capability[1]}"
    recipe = cuda_recipe(name, head_size, instructions.removeprefix("sm_"), nvcc)
    library, remark = load_recipe(recipe, cache_folder(), check)
    return Kernels(library, nvcc.name, instructions, remark)


def cuda_recipe(name: str, head_size: int, architecture: str, nvcc: Compiler) -> Recipe:
    """How to build one operator for one head size; `architecture` is 80 for sm_80."""
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    sources = with_headers([source_folder("cuda") / f"{name}.cu"])
    return Recipe(name, nvcc, (*FLAGS, target), sources, (head_size,))


def find_nvcc() -> Compiler:
    """The compiler that CUDACXX names, else nvcc of CUDA_HOME, CUDA_PATH, PATH or the toolkit's usual place."""
    if sys.platform == "win32":
        raise NoCompiler("the CUDA operators are built on Linux only; choose kernels: torch")
    given = os.environ.get("CUDACXX", "").strip()
    if given:
        found = shutil.which(given)
        if found is None:
            raise KernelError(f"CUDACXX={given}: there is no such compiler; correct or unset it")
        return _describe(found, Path(found).stat().st_mtime_ns)
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [str(Path(home) / "bin" / "nvcc") for home in (*homes, "/usr/local/cuda") if home]
    for place in (*places[:-1], "nvcc", places[-1]):
        found = shutil.which(place)
        if found is not None:
            return _describe(found, Path(found).stat().st_mtime_ns)
    raise NoCompiler(
        "no nvcc (looked at CUDACXX, CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda); install the CUDA toolkit, "
        "or choose kernels: torch"
    )


@functools.lru_cache(maxsize=4)
def _describe(command: str, modified: int) -> Compiler:
    """Asks the compiler what it is; `modified` makes an exchanged compiler a new question."""
    text = call([command, "--version"], what=command).stdout
    version = re.search(r"release (\d+\.\d+)", text)
    return Compiler((command,), f"nvcc {version.group(1) if version else ''}".strip(), text)
