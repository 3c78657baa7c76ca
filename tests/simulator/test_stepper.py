"""The page of a recording: what it holds, and what a browser shows of it."""

import inspect
import json
import re

import numpy as np
import pytest
from chromium import PROGRAM, Browser
from numba import cuda, float32
from test_recording import block_sum_kernel, half_wait_kernel, late_kernel, neighbour_kernel, ones

from xtrain.kernels.primitives.hopper import mbar_init, mbar_init_fence, shared_base
from xtrain.kernels.rmsnorm import rmsnorm_fwd
from xtrain.simulator import Stepper, record, sim
from xtrain.simulator.observers import observe


@cuda.jit
def columns_kernel(y_RC, x_RC):
    tile = cuda.shared.array((32, 32), float32)
    t = cuda.threadIdx.x
    for r in range(32):
        tile[r, t] = x_RC[r, t]
    cuda.syncthreads()
    for r in range(32):
        y_RC[r, t] = tile[t, r]


@cuda.jit
def barrier_kernel(y):
    t = cuda.threadIdx.x
    if t == 0:
        mbar_init(shared_base(), 1)
        mbar_init_fence()
    y[t] = float32(2.0)


def contents(recording):
    """What the page holds, read back from its text."""
    text = re.search(r'id="data">(.*?)</script>', recording.page(), re.S)[1]
    assert "<" not in text
    return json.loads(text)


def test_the_page_holds_the_kernel_its_accesses_and_no_more():
    page = record(block_sum_kernel, 1, 64, ones(1), ones(64)).page()
    found = contents(record(block_sum_kernel, 1, 64, ones(1), ones(64)))
    assert [a["name"] for a in found["arrays"]] == ["x", "s", "y"]
    assert sum(len(s["e"]) for s in found["steps"] if s["h"] == "write") == 64 + 63 + 1
    (file,) = found["files"]
    assert file["title"] == "test_recording.py"
    assert file["functions"][0]["lines"][1] == "def block_sum_kernel(y, x):"
    assert found["error"] is None
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_same_recording_is_the_same_page():
    make = lambda: record(neighbour_kernel, 1, 64, ones(64), ones(64)).page()
    assert make() == make()


def test_device_functions_are_shown_with_the_calls_that_lead_to_them():
    recording = Stepper()
    with observe(recording):
        rmsnorm_fwd(sim(np.ones((2, 64), np.float32)), ones(64), 1e-6)
    found = contents(recording)
    assert found["files"][0]["title"] == "rmsnorm.py"
    assert {"reduce.py", "rows.py"} <= {file["title"] for file in found["files"]}
    deepest = max(found["steps"], key=lambda step: len(step["p"]))
    assert [found["files"][f]["title"] for f, _ in deepest["p"]] == ["rmsnorm.py", "rows.py", "reduce.py"]  # fmt: skip


def test_an_error_has_its_step_its_thread_and_both_lines():
    recording = record(neighbour_kernel, 1, 64, ones(64), ones(64))
    found = contents(recording)["error"]
    assert found["text"] == str(recording.error)
    assert found["thread"] == recording.error.thread
    assert len(found["cells"]) == 1 and "the other access is in step" in found["told"]
    assert [line for _, line in found["lines"]] == [site.line for site in recording.error.sites]


def test_values_that_json_has_not():
    x = np.array([np.nan, np.inf, 1.23456789], np.float32)
    found = contents(record(late_kernel, 1, 3, ones(3), sim(x)))
    assert found["steps"][0]["v"] == ["nan", "inf", 1.235]


def test_a_block_without_accesses():
    @cuda.jit
    def nothing_kernel(y):
        pass

    assert contents(record(nothing_kernel, 1, 32, ones(1)))["steps"] == []


def test_the_engines_that_are_not_drawn_are_named():
    recording = record(barrier_kernel, 1, 32, ones(32), shared=16)
    assert contents(recording)["engines"]
    assert not contents(record(late_kernel, 1, 32, ones(32), ones(32)))["engines"]


def test_a_notebook_gets_a_frame():
    text = record(late_kernel, 1, 32, ones(32), ones(32))._repr_html_()
    assert text.startswith("<iframe srcdoc=") and "<script" not in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("needs Chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def opened(browser, folder, recording, width=1280):
    path = recording.save(folder / "page.html")
    browser.open(f"file://{path}", width)
    return browser.evaluate


def key(browser, name):
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)


def test_slider_keys_and_buttons(browser, tmp_path):
    recording = record(block_sum_kernel, 1, 64, ones(1), ones(64))
    see = opened(browser, tmp_path, recording)
    count = lambda: see("document.getElementById('count').textContent")
    assert count().startswith("step 1 of")
    assert see("document.querySelectorAll('#threads .read').length") == 64
    key(browser, "ArrowRight")
    assert count().startswith("step 2 of")
    assert see("document.querySelectorAll('#threads .write').length") == 64
    see("document.getElementById('next').click()")
    assert see("document.querySelectorAll('#threads .sync').length") == 64
    key(browser, "End")
    assert see("document.querySelectorAll('#threads .write').length") == 1
    assert see("document.querySelectorAll('#threads .done').length") == 32
    line = recording.steps()[-1].event.site.line
    assert f"line {line}:" in see("document.getElementById('said').textContent")
    see("slider.value = 3; slider.oninput()")
    assert "no bank conflict" in see("document.getElementById('said').textContent")
    key(browser, "Home")
    assert count().startswith("step 1 of")
    see("document.querySelectorAll('#threads .cell')[5].click()")
    assert "thread 5: read x[5] = 1" in see("document.getElementById('about').textContent")
    see("document.getElementById('play').click()")
    browser.wait("now >= 2")
    assert not browser.complaints


def test_a_race_is_shown_where_it_happens(browser, tmp_path):
    recording = record(neighbour_kernel, 1, 64, ones(64), ones(64))
    see = opened(browser, tmp_path, recording)
    thread = recording.error.thread
    assert see(f"document.querySelectorAll('#threads .cell')[{thread}].classList.contains('bad')")
    assert see("document.querySelectorAll('.mem .bad').length") == 1
    bad = see("[...document.querySelectorAll('#source .bad b')].map(b => +b.textContent)")
    assert bad == sorted({site.line for site in recording.error.sites})
    see("go(0)")
    assert see("document.querySelectorAll('#source .bad').length") == 0
    see("document.getElementById('to-error').click()")
    assert see("document.querySelectorAll('.mem .bad').length") == 1
    assert not browser.complaints


@cuda.jit
def quoted_kernel(y, x):
    """One line
    and a 'second' # one."""
    t = cuda.threadIdx.x  # "no string"
    if t < x.size:
        y[t] = x[t]


def test_the_source_is_highlighted_and_complete(browser, tmp_path):
    see = opened(browser, tmp_path, record(quoted_kernel, 1, 32, ones(32), ones(32)))
    parts = lambda kind: see(
        f"[...document.querySelectorAll('#source .{kind}')].map(e => e.textContent)"
    )
    assert parts("q") == ['"""One line', "    and a 'second' # one." + 3 * '"']
    assert parts("c") == ['# "no string"']
    assert parts("k") == ["@cuda.jit", "def", "if"]
    text = see("[...document.querySelectorAll('#source div')].map(e => e.textContent)")
    assert [re.sub(r"^\d+", "", line) for line in text] == [
        line.rstrip("\n") for line in inspect.getsourcelines(quoted_kernel.py_func)[0]
    ]
    assert not see("document.querySelector('#engines').offsetParent")  # not shown
    assert not browser.complaints


def test_a_deadlock_is_shown(browser, tmp_path):
    see = opened(browser, tmp_path, record(half_wait_kernel, 1, 64, ones(64), ones(64)))
    assert see("document.querySelectorAll('#threads .bad').length") == 10
    assert "the others do not come" in see("document.getElementById('said').textContent")


def test_bank_conflicts_and_sectors_are_counted(browser, tmp_path):
    recording = record(columns_kernel, 1, 32, sim(np.zeros((32, 32), np.float32)), ones(32, 32))
    see = opened(browser, tmp_path, recording)
    assert "4 sectors of 32 bytes, 100 % used" in see("document.getElementById('said').textContent")
    see("go(65)")
    assert "32-way bank conflict" in see("document.getElementById('said').textContent")


def test_a_phone_scrolls_in_one_direction_only(browser, tmp_path):
    recording = record(columns_kernel, 1, 32, sim(np.zeros((32, 32), np.float32)), ones(32, 32))
    see = opened(browser, tmp_path, recording, width=390)
    assert see("document.documentElement.scrollWidth <= innerWidth")
    assert see("document.getElementById('source').clientHeight <= 0.35 * innerHeight")
    assert not browser.complaints


def test_every_array_and_its_accesses_are_in_sight(browser, tmp_path):
    recording = record(columns_kernel, 1, 32, sim(np.zeros((32, 32), np.float32)), ones(32, 32))
    see = opened(browser, tmp_path, recording)
    lists = "[...document.querySelectorAll('.rows')]"
    assert see(f"{lists}.map(e => e.scrollHeight > 2 * e.clientHeight)") == [True] * 3
    see("go(63)")  # the last row of x is written to the tile
    cell = "document.querySelector('.mem .cell.write').getBoundingClientRect()"
    box = f"{lists}.find(e => e.querySelector('.write')).getBoundingClientRect()"
    assert see(f"{cell}.top >= {box}.top && {cell}.bottom <= {box}.bottom")
    assert see("scrollY") == 0


@cuda.jit
def shared_element_kernel(y, x):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x % 32]


def test_a_thread_is_followed_where_other_warps_access_the_same_element(browser, tmp_path):
    see = opened(browser, tmp_path, record(shared_element_kernel, 1, 64, ones(64), ones(32)))
    see("document.querySelectorAll('#threads .cell')[3].click()")
    found = see("[...document.querySelectorAll('.mem .read')].map(e => e.textContent)")
    assert found == ["×2"] * 32
    assert see("document.querySelectorAll('.mem .read:not(.faint)').length") == 1
