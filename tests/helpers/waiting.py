"""Wait for something that another thread or process does, and ports."""

import socket
import time


def until(condition, seconds=20):
    """Wait until condition() is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listening(port):
    """Does a process of this machine listen on the port?"""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
