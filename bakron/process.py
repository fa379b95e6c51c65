"""Memory of this process: how much it has, how much it had at most, and giving back what it does not need."""

from __future__ import annotations

import ctypes
import resource
import sys


def memory() -> dict[str, int | None]:
    """Resident set of this process in bytes: now (None where the system does not tell), and at its largest so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            current = int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        current = None
    return {"current": current, "peak": peak_memory()}


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    try:
        with open(
            "/proc/self/status", encoding="ascii"
        ) as file:  # Linux; what getrusage has there is at least that of the process which started this one
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def trim() -> None:
    """Give freed memory back to the system.

    The C library (glibc) keeps freed tensors of up to 32 MB for later ones, of other sizes as it turns out: hundreds of megabytes, which no one else can use and
    which make the peak of a run a matter of chance. Elsewhere this does nothing.
    """
    if (found := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        found(0)
