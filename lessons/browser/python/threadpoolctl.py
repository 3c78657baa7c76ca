"""In the place of threadpoolctl: NumPy has one thread in a browser."""

from contextlib import nullcontext


def threadpool_info():
    """Return no libraries: none has threads."""
    return []


def threadpool_limits(number, api):
    """Return a context that changes nothing."""
    return nullcontext()
