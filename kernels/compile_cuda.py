"""Compiles every CUDA kernel for every architecture; exit status 1 if one fails, warns, or needs too much.

Too much is: any local memory (spilled registers or a stack frame), or more registers than let as many blocks share a
multiprocessor as the kernels' headers count on. `python kernels/compile_cuda.py [NAME ...]`; needs nvcc on PATH.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Head size: registers that a thread may use in the forward and in the backward.
MOST_REGISTERS = {64: {"forward": 128, "backward": 168}, 128: {"forward": 128, "backward": 255}}
# Kernels with other bounds, for these head sizes alone; 0 is no head size.
OTHER_REGISTERS = {
    "wkv7_tensor": {64: {"forward": 168, "backward": 255}},
    "norm_mix": {0: {"forward": 128, "backward": 128}},
    "relu2": {0: {"forward": 32, "backward": 32}},
    "gated_norm": {0: {"forward": 64, "backward": 96}},
    "wkv7_prepare": {0: {"forward": 80, "backward": 96}},
    "softmax_loss": {0: {"forward": 40}},
    "sigmoid_gate": {0: {"forward": 32, "backward": 40}},
    "token_mix": {0: {"forward": 64, "backward": 96}},
}
# How many kernels a file has: forward and backward, each in three dtypes, and more where forms differ by what is given.
NUM_KERNELS = {"norm_mix": 24, "gated_norm": 12}
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<architecture>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def main(arguments: Sequence[str]) -> int:
    names = list(arguments) or sorted(path.stem for path in FOLDER.glob("*.cu"))
    jobs = [(name, size) for name in names for size in OTHER_REGISTERS.get(name, MOST_REGISTERS)]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        problems = [problem for found in pool.map(lambda job: compile_one(*job), jobs) for problem in found]
    for problem in problems:
        print(problem)
    print(f"{len(jobs) * len(ARCHITECTURES)} compilations, {len(problems)} problems")
    return 1 if problems else 0


def compile_one(
    name: str, size: int, source_folder: Path = FOLDER, architectures: Sequence[int] = ARCHITECTURES
) -> list[str]:
    """What is wrong with an operator of one head size."""
    # 16 is the CHUNK_LENGTH of rwkv_spec/ops/build_cuda.py, which a test holds.
    flags = ["-std=c++17", "-O3", f"-DHEAD_SIZE={size}", "-DCHUNK_LENGTH=16", "-Werror", "all-warnings"]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "all.fatbin")
        source = str(source_folder / f"{name}.cu")
        command = ["nvcc", *flags, *targets, "-Xptxas", "-v", "-fatbin", source, "-o", output]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        return [f"{name}.cu, head size {size}: {text}"]
    return judge(name, size, len(architectures), text)


def judge(name: str, size: int, num_architectures: int, text: str) -> list[str]:
    """What is wrong by ptxas' own words."""
    problems = []
    kernels = list(KERNEL.finditer(text))
    if len(kernels) != NUM_KERNELS.get(name, 6) * num_architectures:
        problems.append(f"{name}.cu, head size {size}: ptxas speaks of {len(kernels)} kernels")
    for found in kernels:
        direction = "backward" if "backward" in found["name"] else "forward"
        place = f"{name} {direction}, head size {size}, sm_{found['architecture']}"
        if any(int(found[key]) for key in ("stack", "stores", "loads")):
            problems.append(
                f"{place}: local memory ({found['stack']} bytes of stack, {found['stores']} bytes spilled); "
                "fewer values must be alive at once"
            )
        most = OTHER_REGISTERS.get(name, MOST_REGISTERS)[size][direction]
        if int(found["registers"]) > most:
            problems.append(f"{place}: {found['registers']} registers, at most {most}")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
