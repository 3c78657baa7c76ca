"""Facts about this machine that need no library."""

import contextlib
import os
import re
from pathlib import Path


def free_memory() -> int | None:
    """Bytes of host memory that are free: of the machine, or of the container where it allows less; None if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            limit = int((group / "memory.max").read_text(encoding="utf-8"))
            free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
        return max(free, 0)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
