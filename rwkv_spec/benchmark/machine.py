"""What a measuring process can say of itself and of the machine: memory, the processor's name, the product rate."""

from __future__ import annotations

import platform
import re
import statistics
import sys
import time
from pathlib import Path

import torch

PRODUCT_SIZE = 2048
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def peak_memory() -> int | None:
    """The largest resident size of this process in bytes, or None where the system does not tell.

    Linux lets a child's getrusage begin with its parent's size; the high-water mark is the process's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"), re.MULTILINE)
        return int(found.group(1)) * 1024 if found else None
    if sys.platform == "win32":
        return None
    import resource

    # macOS counts bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def processor_name() -> str:
    """As the system calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The processor, or the GPU that torch would use."""
    return torch.cuda.get_device_name(0) if device == "cuda" else processor_name()


def product_rate(device: torch.device, precision: str) -> float:
    """Floating-point operations a second of a square matrix product in the run's dtype: the median of ten."""
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device).to(_DTYPES[precision]) for _ in range(2))
    seconds = []
    for _ in range(12):
        started = now(device)
        torch.mm(left, right)
        seconds.append(now(device) - started)
    return 2 * PRODUCT_SIZE**3 / statistics.median(seconds[2:])


def now(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
