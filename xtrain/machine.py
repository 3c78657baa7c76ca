"""Facts about this machine, from the standard library alone."""

import contextlib
import os
import re
from pathlib import Path


def free_memory() -> int | None:
    """Free host memory in bytes, of the machine or, if lower, of the container; None if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        available = re.search(r"MemAvailable:\s+(\d+)", text)
        free = 1024 * int(available[1] if available else "")  # "": ValueError, try the next way
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            limit = int((group / "memory.max").read_text(encoding="utf-8"))
            free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
        return max(free, 0)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
