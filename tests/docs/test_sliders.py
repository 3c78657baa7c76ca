"""lessons/browser/sliders.js: its formulas are those of the library and of the lessons. They run in Node."""

import ast
import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
from small_site import ROOT

from xtrain import lesson
from xtrain.kernels import grad_norm, rmsnorm
from xtrain.kernels.decoding.kv_cache import kv_cache_bytes

FILE = ROOT / "lessons/browser/sliders.js"
SCRIPT = """
const {formulas, CARDS} = require(process.argv[1]);
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = asked.map(([name, ...given]) => name === "CARDS" ? CARDS : formulas[name](...given));
process.stdout.write(JSON.stringify(answers));
"""


@pytest.fixture(scope="module")
def ask():
    """What the formulas of the page give: ask([[name, argument, ...], ...])."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")  # nothing else runs the page's formulas without a page

    def run(asked):
        done = subprocess.run(
            [node, "-e", SCRIPT, FILE], input=json.dumps(asked), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def of_lesson(stem, *names):
    """Functions and constants of a lesson's source, without the lesson around them."""
    tree = ast.parse((ROOT / f"lessons/{stem}.py").read_text(encoding="utf-8"))
    named = lambda node: (
        getattr(node, "name", None) or getattr(getattr(node, "targets", [None])[0], "id", None)
    )
    wanted = [node for node in tree.body if named(node) in names]
    assert len(wanted) == len(names)
    space = {"np": np}
    exec(compile(ast.Module(wanted, []), stem, "exec"), space)
    return [space[name] for name in names]


def test_the_roofline_is_the_one_that_the_lessons_draw(ask):
    bandwidth, peak = 4.0e12, 67e12
    figure = lesson.figures.roofline({"a": (0.5, 1e12)}, bandwidth, peak)
    x, y = figure.axes[0].lines[0].get_data()
    got = ask([["roofline", i, bandwidth / 1e12, peak / 1e12] for i in x])
    np.testing.assert_allclose(got, y, rtol=1e-12)
    assert min(got) < peak / 1e12 == max(got)  # both parts of the roof


def test_the_blocks_of_a_multiprocessor_are_those_of_lesson_31(ask):
    resident, cards = of_lesson("31_hardware", "resident_blocks_solution", "CARDS")
    assert ask([["CARDS"]]) == [cards]
    cases = list(
        itertools.product(
            (32, 48, 256, 1024), (16, 33, 64, 168, 255), (0, 40 * 1024, 90 * 1024), cards.values()
        )
    )
    got = ask([["residentBlocks", *case] for case in cases])
    assert got == [resident(*case) for case in cases]
    assert 0 in got and max(got) == 32


def test_the_blocks_of_a_multiprocessor_are_those_that_kernels_are_launched_with(ask):
    [cards] = of_lesson("31_hardware", "CARDS")
    asked = [(32, 128), (32, 168), (256, 32)]
    got = ask(
        [["residentBlocks", threads, registers, 0, cards["H100"]] for threads, registers in asked]
    )
    assert [got[0], got[1], 132 * got[2]] == [
        rmsnorm.RESIDENT,
        rmsnorm.RESIDENT_WIDE,
        grad_norm.PARTIALS,
    ]


def test_the_cache_in_use_is_counted_in_bytes_of_the_library(ask):
    rng = np.random.default_rng(0)
    for block in (1, 16, 100, 2048):
        tokens = rng.integers(1, 2048, 8).tolist()
        bytes_of = lambda rows, block=block: kv_cache_bytes(1, 1, 8, rows, 128, np.float16)
        reserved = sum(bytes_of(block * len(range(0, n, block))) for n in tokens)
        [got] = ask([["cacheUse", tokens, block]])
        assert got == pytest.approx(sum(map(bytes_of, tokens)) / reserved, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_what_the_ranks_of_lesson_32_send(ask, ranks):
    part, ring = of_lesson("32_model_parallel", "part", "ring_all_reduce_solution")
    ring.__globals__["part"] = part

    def work(comm):
        x_n = np.full(840, 2.0**comm.rank)
        ring(comm, x_n)
        return comm.sent, x_n

    found = lesson.run_ranks(ranks, work)
    steps = 2 * (ranks - 1)
    sends, *states = ask(
        [["ringSends", 840, ranks], ["ringState", ranks, steps], ["ringState", ranks, steps - 1]]
    )
    assert [sent for sent, _ in found] == [sends] * ranks
    # powers of two are the bits of the page: a chunk that has all of them is the sum
    assert all(set(x_n) == {states[0][0][0]} for _, x_n in found)
    assert states[0] == [[2**ranks - 1] * ranks] * ranks
    assert states[1] != states[0]  # not a step earlier


def test_no_rank_counts_a_chunk_twice(ask):
    """In each step of the first half a rank gets the numbers of ranks whose numbers it has not."""
    for ranks in (2, 3, 5, 8):
        for step in range(ranks - 1):
            before, received = ask([["ringState", ranks, step], ["ringReceives", ranks, step, 0]])
            assert before[0][received] & before[ranks - 1][received] == 0


def test_the_tokens_of_a_step_and_the_best_length_are_those_of_lesson_36(ask):
    judge = lesson.load_checks("lesson_36")
    [best_of] = of_lesson("36_speculation", "best_length_solution")
    for p in (0.0, 0.3, 0.7, 1.0):
        seconds = [1 + 0.08 * k for k in range(16)]
        expected, (best, speedup) = ask([["expectedTokens", p, 7], ["bestLength", p, seconds]])
        assert expected == pytest.approx(judge.expected(p, 7), rel=1e-12)
        assert best == judge.best(p, seconds)
        assert (best, speedup) == (
            best_of(p, seconds)[0],
            pytest.approx(best_of(p, seconds)[1], rel=1e-12),
        )
