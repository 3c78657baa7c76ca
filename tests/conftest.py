"""Skip tests marked `gpu` on machines without a GPU; choose the number of test processes; freeze garbage collection."""

import collections
import gc
import os
import sys

# for small matrices, threads cost more time than they save
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# without bytecode the tests start 7 s later, and every command that they start takes 0.4 s longer
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.path.abspath(f"{__file__}/../../.pytest_cache/bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import pytest
import translations
from chromium import PROGRAM, Browser

from xtrain import device
from xtrain.training.run_log import RunLog

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the compile tests need none
    pass
else:  # a test that is slow because other work has the cores has not failed
    settings.register_profile("xtrain", deadline=None)
    settings.load_profile("xtrain")


translations.share()

draw = RunLog.picture
RunLog.picture = lambda self: None  # takes longer than all the rest of a short run


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")  # nothing else runs pages' scripts
    program = Browser(tmp_path_factory.mktemp("profile"))
    yield program
    program.close()


@pytest.fixture
def browser(chromium):
    """The tab of this process's Chromium, without a page and without complaints."""
    chromium.open("about:blank")
    chromium.complaints.clear()
    return chromium


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of data sets that all tests of this process share, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small random model with a tokenizer."""
    from serving import make_folder  # here: the compile tests do not have its packages

    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def switch_often():
    """Python switches between threads every 10 microseconds instead of 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def loss_picture(monkeypatch):
    """Let runs draw loss.png, as they do outside the tests."""
    monkeypatch.setattr(RunLog, "picture", draw)


def is_inner_loop(config) -> bool:
    """`pytest tests/kernels`: what a kernel's author runs again and again. Without the tests marked `long`."""
    here = os.path.dirname(os.path.abspath(__file__))
    return [os.path.abspath(path) for path in config.args] == [os.path.join(here, "kernels")]


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "chromium" in item.fixturenames:
            item.add_marker("pages")
    if is_inner_loop(config) and not config.option.markexpr and not config.option.keyword:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        longest_files_first(items)
    if not device.gpu_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                # the mark is for speed, memory and real streams; values are tested in the simulator, too
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_configure(config):
    # pytest-xdist would begin with the files of the most tests, whatever longest_files_first says
    config.option.loadscopereorder = False


def longest_files_first(items):
    """Sort the files by the seconds that their marks promise: no process begins a long one when the others have ended."""
    seconds = collections.Counter()
    for item in items:
        long = item.get_closest_marker("slow") or item.get_closest_marker("mpi")
        seconds[item.path] += 10 if long else 0.1
    items.sort(key=lambda item: (-seconds[item.path], item.path))


def pytest_collection_finish():
    """Keep what was imported and collected out of full garbage collections: every training run makes two."""
    gc.collect()
    gc.freeze()
    if "XTRAIN_COMPILE" in os.environ or "XTRAIN_COMPILER" in os.environ:
        gc.set_threshold(100_000)  # a compiler makes many objects and few cycles: 8 % less time


def pytest_xdist_auto_num_workers(config):
    """`-n auto` in setup.cfg: the suite (also without a mark) and the inner loop on all cores (at most 8: they share a GPU),
    other parts in one."""
    marks = config.option.markexpr and not config.option.markexpr.startswith("not ")
    part = config.option.keyword or marks or config.args_source.name == "ARGS"
    return 0 if part and not is_inner_loop(config) else min(8, os.cpu_count() or 1)
