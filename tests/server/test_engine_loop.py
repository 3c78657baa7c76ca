"""The two sides of the connection: what the engine's loop sends and when, and what becomes of one side when the other ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from load import make_folder  # noqa: E402
from twins import random_model, small  # noqa: E402
from waiting import free_port, listening, until  # noqa: E402

from xtrain import Engine  # noqa: E402
from xtrain.server.engine_loop import EngineLoop  # noqa: E402
from xtrain.serving.requests import make_requests  # noqa: E402

CONFIG = small(head_dim=16)


@pytest.fixture
def sides():
    """-> the engine, and the HTTP side's end of the connection to its loop"""
    engine = Engine(random_model(CONFIG, device="cpu"), 2)
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=EngineLoop(engine, theirs).run, daemon=True)
    thread.start()
    yield engine, ours
    ours.close()
    thread.join(20)
    assert not thread.is_alive() and len(engine.scheduler.free_slots) == 2


def requests(engine, *lengths):
    prompts = [[i + 1] for i in range(len(lengths))]
    return make_requests(
        prompts, CONFIG, engine.max_seq_len, (), 0, max_new_tokens=list(lengths), logprobs=1
    )


def receive(connection):
    assert connection.poll(20), "no news"
    return connection.recv()


def test_news_wait_until_they_are_wanted_and_are_then_merged(sides):
    engine, connection = sides
    want = Engine(engine.model, 1).generate([[1], [2]], [9, 5])
    connection.send(("submit", 7, requests(engine, 9, 5)))
    until(lambda: engine.steps and not engine.scheduler.unfinished)
    assert not connection.poll(0.05)  # the HTTP side has not asked
    connection.send(("more",))
    news, figures = receive(connection)
    assert [n[:3] for n in news] == [(7, 0, want[0]), (7, 1, want[1])]
    assert [len(logprobs) for *_, logprobs, _ in news] == [9, 5]
    assert [reason for *_, reason in news] == ["length"] * 2
    assert (figures.slots, figures.slots_used, figures.steps) == (2, 0, engine.steps)
    connection.send(("more",))
    assert not connection.poll(0.05)  # and there are none


def test_news_of_each_step_if_the_http_side_is_fast(sides):
    engine, connection = sides
    longest = engine.max_seq_len - 2  # so long that even a busy machine runs both sides in between
    (want,) = Engine(engine.model, 1).generate([[1]], longest)
    connection.send(("more",))
    connection.send(("submit", 0, requests(engine, longest)))
    tokens, pieces, reason = [], 0, None
    while reason is None:
        for _, _, new, *_, why in receive(connection)[0]:
            tokens, pieces, reason = tokens + new, pieces + bool(new), why
        connection.send(("more",))
    assert tokens == want and pieces > 1


def test_a_cancelled_sequence_frees_its_slot_and_has_no_news(sides):
    engine, connection = sides
    longest = engine.max_seq_len - 2
    connection.send(("submit", 0, requests(engine, longest, 3)))
    connection.send(("cancel", 0, 0))
    connection.send(("cancel", 5, 0))  # of a job that has ended
    until(lambda: engine.scheduler.submitted and not engine.scheduler.unfinished)
    connection.send(("more",))
    news, figures = receive(connection)
    assert [n[1] for n in news] == [1] and figures.slots_used == 0


def start(folder, port):
    command = [sys.executable, "-m", "xtrain.serve", "--model", str(folder), "--port", str(port)]
    return subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the other process in /proc")
def test_if_one_process_dies_the_other_ends(tmp_path):
    folder = make_folder(tmp_path)
    ports = [free_port(), free_port()]
    engine_dies, http_dies = servers = [start(folder, port) for port in ports]
    try:
        until(lambda: all(map(listening, ports)), 120)
        second = start(folder, ports[0])
        servers.append(second)
        body = {"prompt": "def f", "max_tokens": 4, "seed": 1}
        url = f"http://127.0.0.1:{ports[0]}"
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        figures = httpx.get(url + "/metrics").text
        assert "xtrain_slots 32.0" in figures and "xtrain_decoded_tokens_total 3.0" in figures
        errors = second.communicate(timeout=120)[1]
        assert second.returncode == 2 and "choose another --port" in errors, errors

        engine_dies.kill()
        until(lambda: not listening(ports[0]))

        children = Path(f"/proc/{http_dies.pid}/task/{http_dies.pid}/children").read_text().split()
        (child,) = [
            int(pid)
            for pid in children
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(child, signal.SIGKILL)
        errors = http_dies.communicate(timeout=60)[1]
        assert http_dies.returncode == 1 and "the HTTP process ended" in errors, errors
    finally:
        for server in servers:
            server.kill()
            server.communicate()
