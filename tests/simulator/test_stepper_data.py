"""What the page of a recording shows of data: arrays in their shape, variables, counters, the grid, sizes for fingers."""

import functools
import time

import numpy as np
from numba import cuda, float32

from xtrain.simulator import record


@cuda.jit(device=True)
def times(a, b):
    scaled = a * b
    cuda.syncthreads()
    return scaled


@cuda.jit
def product(c, a, b):
    s = cuda.shared.array((16, 16), float32)
    t = cuda.shared.array((16, 16), float32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    y = cuda.blockIdx.y * 16 + i
    acc = float32(0)
    for k0 in range(0, a.shape[1], 16):
        s[i, j] = a[y, k0 + j]
        t[i, j] = b[k0 + i, j]
        cuda.syncthreads()
        for k in range(16):
            acc += s[i, k] * t[k, j]
        cuda.syncthreads()
    c[y, j] = acc


def values(n):
    """Of three digits at most, as cells show them."""
    return (np.arange(16 * n, dtype=np.float32) % 15).reshape(16, n) / 4


@functools.cache
def recorded(n=32):
    a = values(n)
    b = np.ones((n, 16), np.float32)
    return record(
        product, (1, 3), (16, 16), np.zeros((48, 16), np.float32), np.vstack([a] * 3), b, of=(0, 1)
    )


def opened(browser, folder, recording, width=1280):
    browser.open(f"file://{recording.save(folder / 'page.html')}", width)
    return browser.evaluate


def test_a_tile_is_as_many_rows_as_it_has_and_shows_its_values(browser, tmp_path):
    see = opened(browser, tmp_path, recorded())
    names = see("[...document.querySelectorAll('.mem h2')].map(e => e.textContent)")
    assert "s shared memory, shape (16, 16)" in names
    tile = f"document.querySelectorAll('.mem')[{names.index('s shared memory, shape (16, 16)')}]"
    see("go(last)")
    rows = see(
        f"[...{tile}.querySelectorAll('.row:not(.head)')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert len(rows) == 16 and all(len(row) == 17 for row in rows)
    a = values(32)[:, 16:]
    assert [float(v) for v in rows[1][1:]] == [round(float(v), 3) for v in a[1]]
    assert [row[0] for row in rows] == [str(r) for r in range(16)]
    see("go(1)")
    cell = f"{tile}.querySelectorAll('.write')[3]"
    assert see(f"{cell}.textContent") == ".75"
    see("document.getElementById('numbers').click()")
    assert see(f"{cell}.textContent") == "t3"
    assert not browser.complaints


def test_a_chosen_thread_shows_its_variables_and_its_accesses(browser, tmp_path):
    see = opened(browser, tmp_path, recorded())
    panel = lambda: see("document.getElementById('variables').textContent")
    assert panel() == ""
    see("go(last); document.querySelectorAll('#threads .cell')[17].click()")
    a, b = values(32)[1], np.ones(32)
    for words in (
        "thread 17",
        "threadIdx (1, 1, 0)",
        "warp 0, lane 17",
        "68 reads, 5 writes, 0 atomics",
        "k = 15",
        f"acc = {a @ b:.4g}",
    ):
        assert words in panel(), (words, panel())
    see("go(0)")
    assert "0 writes" in panel() and "acc = 0" in panel()
    assert see("document.querySelectorAll('#variables .now').length") > 0


def test_warps_that_do_the_same_have_one_sentence_with_the_loop_counters(browser, tmp_path):
    see = opened(browser, tmp_path, recorded())
    said = "[...document.querySelectorAll('#said li')].map(e => e.textContent)"
    see("go(3)")
    sentences = see(said)
    assert len(sentences) == 1 and sentences[0].startswith("warps 0 to 7, line ")
    assert "256 lanes write t[0, 0] to t[15, 15]" in sentences[0] and "k0 = 0" in sentences[0]


def test_variables_of_a_device_function_and_local_arrays():
    @cuda.jit
    def kernel(y, x):
        two = cuda.local.array(2, float32)
        two[0] = x[cuda.threadIdx.x]
        two[1] = times(two[0], float32(3))
        y[cuda.threadIdx.x] = two[1]

    recording = record(kernel, 1, 4, np.zeros(4, np.float32), np.ones(4, np.float32))
    changed = {name: v for event in recording.events[2] for name, v in event.changed.items()}
    assert changed["times.scaled"] == 3 and changed["two"] == [1, 3]


def test_the_grid_shows_which_block_it_is(browser, tmp_path):
    see = opened(browser, tmp_path, recorded())
    cells = "[...document.querySelectorAll('#blocks i')]"
    assert see(f"{cells}.map(e => e.className)") == ["", "here", ""]
    assert see(f"{cells}[1].title") == "block (0, 1, 0)"


def test_a_phone_has_targets_for_fingers_and_values_without_hovering(browser, tmp_path):
    see = opened(browser, tmp_path, recorded(), width=390)
    sizes = "[...document.querySelectorAll('button, input')].filter(e => e.offsetParent).map(e => Math.min(e.offsetWidth, e.offsetHeight))"
    assert min(see(sizes)) >= 40
    assert see("document.documentElement.scrollWidth <= innerWidth")
    see("go(3)")
    cells = see(
        "[...document.querySelectorAll('.mem .write')].map(e => [e.textContent, e.offsetWidth, e.offsetHeight])"
    )
    assert all(text and width >= 40 and height >= 40 for text, width, height in cells)
    see("document.querySelector('.mem .write').click()")
    assert "t[0, 0] = 1, by thread 0 in step 4" in see(
        "document.getElementById('about').textContent"
    )
    assert not browser.complaints


@cuda.jit
def product_of_1024(c, a, b):
    s = cuda.shared.array((32, 32), float32)
    t = cuda.shared.array((32, 32), float32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    s[i, j] = a[i, j]
    t[i, j] = b[i, j]
    cuda.syncthreads()
    acc = float32(0)
    for k in range(32):
        acc += s[i, k] * t[k, j]
    c[i, j] = acc


def test_a_product_of_1024_threads_is_quick_and_small():
    a = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    start = time.process_time()
    recording = record(product_of_1024, 1, (32, 32), np.zeros_like(a), a, a)
    page = recording.page()
    assert time.process_time() - start < 6  # 2 s on a quiet core
    assert len(page) < 1_000_000 and not recording.cut
