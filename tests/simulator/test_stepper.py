"""The page of a recording: what it holds, and what a browser shows of it."""

import inspect
import json
import re

import numpy as np
from numba import cuda, float32
from test_recording import block_sum_kernel, half_wait_kernel, late_kernel, neighbour_kernel, ones
from test_recording_engines import SLOT, SLOT_0, W_BYTES, early_row_read, ring

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


def contents(recording):
    """What the page holds, read back from its text."""
    text = re.search(r'id="data">(.*?)</script>', recording.page(), re.S)[1]
    assert "<" not in text
    page = json.loads(text)
    for step in page["steps"]:  # as the page undoes stepper.compact
        for name in ("l", "e"):
            if isinstance(step[name], dict):
                first, by, count = step[name]["q"]
                step[name] = [first + i * by for i in range(count)]
    return page


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


@cuda.jit
def unset_kernel(y):
    s = cuda.shared.array(32, float32)
    y[cuda.threadIdx.x] = s[0]


def test_a_value_that_was_never_written():
    found = contents(record(unset_kernel, 1, 32, ones(32)))
    assert [(s["h"], s["v"][0]) for s in found["steps"][:2]] == [("read", "nan"), ("write", "not written")]  # fmt: skip


def test_a_block_without_accesses():
    @cuda.jit
    def nothing_kernel(y):
        pass

    assert contents(record(nothing_kernel, 1, 32, ones(1)))["steps"] == []


def test_asynchronous_accesses_are_on_the_page_as_ranges():
    recording = ring()[0]
    steps = contents(recording)["steps"]
    copies = [s for s in steps if s.get("n") == "TMA" and "r" in s]
    assert [s["r"] for s in copies[:2]] == [[[256, 2304]], [[2304, 2560]]]
    for s in steps:
        if "r" in s:  # it ends in the step that says so
            assert [s["t"], s["r"]] in next(x["x"] for x in steps if x["t"] == s["u"] and "x" in x)
    states = [s["m"] for s in steps if "m" in s and "f" not in s and s["m"][0] == 0]
    assert states[:4] == [[0, 0, 1, 0], [0, 0, 0, SLOT], [0, 0, 0, W_BYTES], [0, 1, 1, 0]]
    assert len(recording.page()) < 70_000


def test_a_notebook_gets_a_frame():
    text = record(late_kernel, 1, 32, ones(32), ones(32))._repr_html_()
    assert text.startswith("<iframe srcdoc=") and "<script" not in text


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
    assert bad_lines(see) == sorted({site.line for site in recording.error.sites})
    see("go(0)")
    assert see("document.querySelectorAll('#source .bad').length") == 0
    see("document.getElementById('to-error').click()")
    assert see("document.querySelectorAll('.mem .bad').length") == 1
    assert not browser.complaints


def bad_lines(see):
    return see("[...document.querySelectorAll('#source .bad b')].map(b => +b.textContent)")


def test_copies_products_and_mbarriers_are_drawn(browser, tmp_path):
    recording = ring()[0]
    see = opened(browser, tmp_path, recording)
    said = lambda: see("document.getElementById('said').innerText")
    cells = lambda kind: see(f"document.querySelectorAll('.mem .cell.{kind}').length")
    rows = lambda: see("[...document.querySelectorAll('#mbarriers div')].map(e => e.textContent)")
    row = lambda n: see(f"document.querySelectorAll('.engine')[{n}].innerText")
    steps = recording.steps()
    time = lambda how, engine, n=0: [
        s.time for s in steps if (s.event.how, s.event.engine) == (how, engine)
    ][n]

    see(f"go({time('write', 'TMA')})")
    assert f"starts a copy: TMA writes bytes {SLOT_0} to 9216" in said()
    assert "warps 0 to 3" in said() and "wait for phase 0 of the mbarrier at byte 0" in said()
    assert cells("fly.write") == 64 and cells("fly.read") == 0
    assert rows()[0] == f"byte 0: phase 0 expects {SLOT} bytes; warps 0 to 3 wait for phase 0"
    assert see("document.querySelectorAll('#threads .held').length") == 128
    key(browser, "ArrowRight")
    assert cells("fly.write") == 72

    see(f"slider.value = {time('TMA ends', 'TMA')}; slider.oninput()")
    assert f"the copy to bytes {SLOT_0} to 9216 is complete" in said()
    assert row(0).startswith("TMA") and "complete" in row(0)
    see("document.getElementById('next').click()")
    assert "phase 0 of the mbarrier at byte 0 is complete" in said()
    assert rows()[0].startswith("byte 0: phase 1 expects 1 arrival; warps 0 to 3 wait for phase 0")
    key(browser, "ArrowRight")
    assert "128 lanes leave mbarrier_wait: phase 0 of the mbarrier at byte 0 is complete" in said()

    see(f"go({time('read', 'wgmma')})")
    assert f"128 lanes start a product: wgmma reads bytes {SLOT_0} to {SLOT_0 + SLOT}" in said()
    assert cells("fly.read") == 72 and cells("fly.write") == 72  # the copy to the other slot
    assert (
        see("document.querySelectorAll('.engine')[1].children.length") == 2
    )  # once for four warps
    see("document.querySelectorAll('.mem .cell')[8].onmouseenter()")
    about = see("document.getElementById('about').textContent")
    assert "bytes 1024 to 1152: TMA writes in step" in about and "wgmma reads in step" in about
    see(f"go({time('wgmma ends', 'wgmma')})")
    assert (
        f"the product is complete and no longer reads bytes {SLOT_0} to {SLOT_0 + SLOT}" in said()
    )
    assert see("document.querySelectorAll('#source .now').length") == 2  # product and wait
    key(browser, "End")
    assert cells("fly.write") == cells("fly.read") == 0 and row(0).strip() == "TMA"
    assert len(rows()) == 4
    assert not browser.complaints


def test_a_slot_that_is_overwritten_while_it_is_read_is_shown(browser, tmp_path):
    recording = ring(early=True)[0]
    see = opened(browser, tmp_path, recording)
    assert bad_lines(see) == sorted(site.line for site in recording.error.sites)
    product = next(s.time for s in recording.steps() if s.event.engine == "wgmma")
    told = f"the other access (wgmma reads) began in step {product + 1}"
    assert told in see("document.querySelector('#said .bad').textContent")
    assert see("document.querySelectorAll('.mem .cell.bad').length") == 64
    assert see("document.querySelectorAll('.mem .cell.fly.read').length") == 8  # w, still intact
    assert see("[...document.querySelectorAll('.engine')].map(e => e.children.length - 1)") == [
        3,
        1,
    ]
    assert see("threads[128].classList.contains('bad') && threads[0].classList.contains('held')")
    source = "document.getElementById('source').getBoundingClientRect()"
    lines = "[...document.querySelectorAll('#source .bad')].map(e => e.getBoundingClientRect())"
    assert see(f"{lines}.every(e => e.top >= {source}.top && e.bottom <= {source}.bottom)")
    key(browser, "ArrowLeft")
    assert bad_lines(see) == [] and see("document.querySelectorAll('.mem .cell.bad').length") == 0
    see("document.getElementById('to-error').click()")
    assert see("document.querySelectorAll('.mem .cell.bad').length") == 64
    assert not browser.complaints


def test_a_read_before_the_copy_has_ended_is_shown(browser, tmp_path):
    recording = early_row_read()
    see = opened(browser, tmp_path, recording)
    assert bad_lines(see) == sorted(site.line for site in recording.error.sites)
    told = see("document.querySelector('#said .bad').textContent")
    assert told.startswith("thread 1 causes the error here; the other access (TMA writes)")
    assert see("document.querySelectorAll('.mem .cell.bad').length") == 1
    assert not browser.complaints


def test_a_wait_for_bytes_that_do_not_come_is_shown(browser, tmp_path):
    see = opened(browser, tmp_path, ring(expected=SLOT + 16)[0])
    said = see("document.getElementById('said').innerText")
    assert "128 lanes wait here, and what they wait for does not come" in said
    assert see("document.querySelectorAll('#mbarriers div')[0].textContent") == "byte 0: phase 0 expects 16 bytes"  # fmt: skip
    assert see("document.querySelectorAll('#threads .bad').length") == 129
    assert not browser.complaints


def test_a_phone_shows_engines_in_its_width(browser, tmp_path):
    see = opened(browser, tmp_path, ring(early=True)[0], width=390)
    assert see("document.documentElement.scrollWidth <= innerWidth")
    inside = "[...document.querySelectorAll('.engine i')].every(e => e.getBoundingClientRect().left >= 60 && e.getBoundingClientRect().right <= innerWidth)"
    assert see(inside)
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
    assert see("['engines', 'mbarriers'].every(id => !document.getElementById(id).textContent)")
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
    found = "[...document.querySelectorAll('.mem .read')].map(e => e.textContent)"
    assert see(found) == ["1"] * 32
    see("document.getElementById('numbers').click()")
    assert see(found) == ["×2"] * 32
    assert see("document.querySelectorAll('.mem .read:not(.faint)').length") == 1
