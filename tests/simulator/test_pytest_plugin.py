"""`pytest --simulate-cuda` and the command that runs a script, each in a process of its own.

The processes see a copy of xtrain/simulator named simulate_cuda, as the distribution in packages/simulate-cuda installs it.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from numba import cuda, float32

@cuda.jit("void(float32[:], float32[:])")
def smooth(y, x):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    {barrier}
    y[i] = tile[i] + tile[(i + 1) % 64]
"""
TESTS = """
import numpy as np
from numba import cuda
import code_under_test  # imported by conftest.py, too

def test_smooth():
    x = cuda.to_device(np.arange(64, dtype=np.float32))
    y = cuda.device_array_like(x)
    code_under_test.smooth[1, 64](y, x)
    assert y.copy_to_host()[:3].tolist() == [1, 3, 5]

def test_without_kernels():
    assert cuda.is_available()
"""
PLUGIN = ["-p", "simulate_cuda.pytest_plugin", "-p", "no:cacheprovider"]
SOURCE = Path(__file__).parents[2] / "xtrain" / "simulator"

EXITING = """
import numpy as np
from numba import cuda

@cuda.jit
def half(x):
    if cuda.threadIdx.x >= 16:
        return
    cuda.syncthreads()
    x[cuda.threadIdx.x] = 1

def test_half():
    half[1, 32](np.zeros(32, np.float32))

@cuda.jit
def before(x):
    x[cuda.threadIdx.x - 1] = 1

def test_before():
    before[1, 1](np.zeros(2))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the package simulate_cuda alone."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE, folder / "simulate_cuda", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def python(package):
    """Run Python in a folder."""

    def run(folder, *arguments, **environment):
        env = {**os.environ, "PYTHONPATH": str(package), **environment}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # which take as long as all the rest
        call = [sys.executable, *arguments]
        return subprocess.run(
            call, cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("import code_under_test\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")

    def write(barrier):
        (tmp_path / "code_under_test.py").write_text(CODE.format(barrier=barrier), encoding="utf-8")
        return tmp_path

    return write


def test_the_code_under_test_runs_unchanged(python, project):
    run = python(project("cuda.syncthreads()"), "-m", "pytest", *PLUGIN, "--simulate-cuda", "-v")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout and "kernels run in the simulator" in run.stdout


def test_a_race_is_reported_like_a_failing_test_also_by_xdist(python, project):
    run = python(
        project("pass"), "-m", "pytest", "-p", "xdist", *PLUGIN, "--simulate-cuda", "-n", "1"
    )
    assert run.returncode == 1 and "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    for line in (
        "code_under_test.smooth[1, 64](y, x)",
        "UninitializedError: uninitialized read in smooth, block (0, 0, 0): thread 0 reads tile[1]",
        "y[i] = tile[i] + tile[(i + 1) % 64]",
        "tile[i] = x[i]",
    ):
        assert line in run.stdout, run.stdout
    assert "simulate_cuda/block.py" not in run.stdout  # no frames of the simulator


def test_a_report_is_a_page_for_each_mistake(python, project):
    folder = project("pass")
    report = ["--simulate-cuda", "--cuda-report", "report.html"]
    run = python(folder, "-m", "pytest", *PLUGIN, *report)
    assert run.returncode == 1 and "report.html" in run.stdout, run.stdout + run.stderr
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "thread 0 reads tile[1]" in page and "def smooth(y, x):" in page
    assert not (folder / "report-2.html").exists()
    run = python(project("cuda.syncthreads()"), "-m", "pytest", *PLUGIN, *report[1:])
    assert run.returncode == 4 and "--cuda-report is for --simulate-cuda" in run.stderr


MANY_BLOCKS = """
import os
import numpy as np
from numba import cuda
from simulate_cuda import processes

def test_fill():
    @cuda.jit
    def fill(x):
        x[cuda.grid(1)] = 1

    processes.WORTH, forks, fork = 0, [], os.fork
    os.fork = lambda: forks.append(1) or fork()
    x = np.zeros(320, np.float32)
    fill[5, 64](x)
    assert x.all() and len(forks) == 3
"""


def test_blocks_in_several_processes(python, tmp_path):
    (tmp_path / "test_it.py").write_text(MANY_BLOCKS, encoding="utf-8")
    pytest_with = "-m", "pytest", *PLUGIN
    more = "--cuda-processes", "3", "--cuda-schedules", "1"
    run = python(tmp_path, *pytest_with, "--simulate-cuda", *more)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
    run = python(tmp_path, *pytest_with, "--simulate-cuda", "--cuda-processes", "0")
    assert run.returncode == 4 and "processes=0 is not a positive integer" in run.stderr
    run = python(tmp_path, *pytest_with, "--cuda-processes", "2")
    assert run.returncode == 4 and "--cuda-processes is for --simulate-cuda" in run.stderr


def test_a_warning_is_one_of_pytest(python, tmp_path):
    (tmp_path / "test_it.py").write_text(EXITING, encoding="utf-8")
    run = python(tmp_path, "-m", "pytest", *PLUGIN, "--simulate-cuda")
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "negative index in before" in run.stdout
    assert "KernelWarning: exited threads in half" in run.stdout and "test_it.py:13" in run.stdout
    run = python(tmp_path, "-m", "pytest", *PLUGIN, "--simulate-cuda", "-W", "error")
    assert "2 failed" in run.stdout


def test_kinds_of_findings_are_allowed_and_enabled(python, project):
    folder, options = project("pass"), ["-m", "pytest", *PLUGIN]
    run = python(folder, *options, "--simulate-cuda", "--cuda-allow", "race,uninitialized")
    assert run.returncode == 1 and "Error: " not in run.stdout.replace("AssertionError: ", "")
    run = python(folder, *options, "--simulate-cuda", "--cuda-enable", "rase")
    assert run.returncode == 4 and "'rase' is not a kind of finding" in run.stderr, run.stderr
    run = python(folder, *options, "--cuda-allow", "race")
    assert run.returncode == 4 and "--cuda-allow is for --simulate-cuda" in run.stderr, run.stderr


def test_the_package_needs_numba_and_numpy_alone_and_loads_them_late(python, tmp_path):
    code = """
import sys, simulate_cuda, simulate_cuda.pytest_plugin
assert "numba" not in sys.modules  # half a second
from simulate_cuda import KernelError, RaceError, run, sim, simulate
assert issubclass(RaceError, KernelError)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"xtrain", "torch", "ml_dtypes", "cupy"}))
"""
    run = python(tmp_path, "-c", code)
    needed = "ml_dtypes" if importlib.util.find_spec("numba_cuda") else ""  # numba-cuda loads it
    assert (run.returncode, run.stdout.strip()) == (0, needed), run.stdout + run.stderr


def test_without_the_option_nothing_is_replaced(python, project):
    run = python(project("cuda.syncthreads()"), "-m", "pytest", *PLUGIN, "-q")
    assert run.returncode != 0 and "CudaSupportError" in run.stdout + run.stderr


def test_numbas_variable_selects_this_simulator(python, project):
    folder = project("pass")
    run = python(folder, "-m", "pytest", *PLUGIN, "-q", NUMBA_ENABLE_CUDASIM="1")
    assert "UninitializedError" in run.stdout, run.stdout + run.stderr


def test_the_command_runs_a_script_with_its_arguments(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport numpy as np\nfrom numba import cuda\n"
        "@cuda.jit\ndef put(x, v):\n    x[cuda.threadIdx.x // int(sys_argv)] = v + cuda.threadIdx.x\n"
        "x = np.zeros(2)\nput[1, 2](x, int(sys.argv[1]))\nprint(x, __name__)\n".replace(
            "int(sys_argv)", "1"
        ),
        encoding="utf-8",
    )
    run = python(tmp_path, "-m", "simulate_cuda", "script.py", "5")
    assert (run.returncode, run.stdout.strip()) == (0, "[5. 6.] __main__"), run.stderr
    run = python(tmp_path, "-m", "simulate_cuda", "-m", "script", "6")
    assert (run.returncode, run.stdout.strip()) == (0, "[6. 7.] __main__"), run.stderr
    script.write_text(script.read_text(encoding="utf-8").replace("// 1", "// 2"), encoding="utf-8")
    run = python(tmp_path, "-m", "simulate_cuda", "script.py", "5")
    assert run.returncode == 1 and "\nRaceError: data race in put" in run.stderr, run.stderr
    assert "    put[1, 2](x, int(sys.argv[1]))" in run.stderr  # where it was launched
    allowed = python(tmp_path, "-m", "simulate_cuda", "--allow", "race", "script.py", "5")
    assert allowed.returncode == 0 and allowed.stdout == "[6. 0.] __main__\n", allowed.stderr
    assert "runpy" not in run.stderr and "simulate_cuda" not in run.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["-m"], ["--help"], ["nothing.py"], ["--allow", "rase", __file__]]
)
def test_a_wrong_command_line_is_one_sentence(python, tmp_path, arguments):
    run = python(tmp_path, "-m", "simulate_cuda", *arguments)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, run.stderr
