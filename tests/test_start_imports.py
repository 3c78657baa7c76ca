"""What `import xtrain` and `xtrain train` import before the first step: packages and rooms that a run may never need stay out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import xtrain
import xtrain.simulator

ROOT = Path(__file__).resolve().parents[1]
# Needed later, or only with some options: the report's pictures, chats, evaluation, serving, other libraries' weights.
LATE = {
    "cupyx", "datasets", "IPython", "jinja2", "lm_eval", "matplotlib", "mpi4py", "numba_cuda_mlir", "pandas", "PIL", "pyarrow",
    "pydantic", "pygments", "safetensors", "scipy", "starlette", "tensorboard", "torch", "trackio", "transformers", "uvicorn", "wandb",
    "zstandard", "xtrain.evaluation.run", "xtrain.serving", "xtrain.server", "xtrain.inspect", "xtrain.tuning", "xtrain.reinforcement",
    "xtrain.parallel",
}  # fmt: skip
LATE_IN_LIBRARY = LATE | {"tokenizers", "rich.progress", "xtrain.training"}

FIRST_STEP = """
import sys
from xtrain.train import main
from xtrain.training.run import Run
def first(run):
    print(*sys.modules, file=sys.stderr)
    sys.exit()
Run.step = first
main(sys.argv[1:])
"""


def imported(code: str, *arguments: object) -> list[str]:
    """-> the modules that a new process names in the last line of stderr"""
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stderr, done.stdout
    return done.stderr.splitlines()[-1].split()


def too_early(modules: list[str], late: set[str]) -> set[str]:
    """-> those of `late` that were imported, themselves or a part of them"""
    return {name for name in late if any(f"{m}.".startswith(f"{name}.") for m in modules)}


def test_importing_xtrain():
    assert too_early(["os", "xtrain.serving.engine"], LATE) == {"xtrain.serving"}
    code = "import sys, xtrain; xtrain.Transformer; print(*sys.modules, file=sys.stderr)"
    modules = imported(code)
    assert "xtrain.nn.model" in modules and too_early(modules, LATE_IN_LIBRARY) == set()


# The rest of xtrain that comes with the primitives; of the simulator, what they register at.
WITH_PRIMITIVES = re.compile(
    r"xtrain(\.(version|machine|errors|option_words|device|kernels(\.primitives(\.\w+)?)?|kernels\.runtime(\.(compiler|instead))?|simulator"
    r"(\.(errors|frontends|half|intrinsics|memory|releases|scalars|sim_array|unset|unwritten))?))?"
)


def test_the_primitives_import_nothing_else():
    """No other package, and nothing of xtrain that they do not use."""
    modules = imported(
        "import sys, numba.cuda, numba.types, ml_dtypes; before = {*sys.modules}\n"
        "import xtrain.kernels.primitives; print(*{*sys.modules} - before, file=sys.stderr)"
    )
    assert "xtrain.kernels.primitives.hopper" in modules
    allowed = {"numba", *sys.stdlib_module_names}
    others = [m for m in modules if m.split(".")[0] not in allowed]
    assert [m for m in others if not WITH_PRIMITIVES.fullmatch(m)] == []


def test_importing_xtrain_alone_imports_no_package():
    modules = imported("import sys, xtrain; print(*sys.modules, file=sys.stderr)")
    assert not {"numpy", "numba"} & set(modules)
    assert {m for m in modules if m.startswith("xtrain.")} <= {"xtrain.machine", "xtrain.version"}


def test_the_engine_is_imported_when_it_is_used():
    code = "import sys, xtrain; xtrain.Engine; print(*sys.modules, file=sys.stderr)"
    assert "xtrain.serving.engine" in imported(code)
    code = "import sys; from xtrain import *; print(*[x for x in dir() if x == Engine.__name__], file=sys.stderr)"
    assert imported(code) == ["Engine"]
    code = "import sys, xtrain; print(hasattr(xtrain, 'Motor'), file=sys.stderr)"
    assert imported(code) == ["False"]


def test_completion_lists_names_that_are_imported_when_they_are_used():
    for package in (xtrain, xtrain.simulator):
        assert set(package.__all__) <= set(dir(package))


def test_until_the_first_step(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 400)
    options = [
        "--data",
        text,
        "--vocab-size",
        300,
        "--steps",
        2,
        "--seq-len",
        16,
        "--batch",
        2,
        "--out",
        tmp_path,
    ]
    modules = imported(FIRST_STEP, *options, "--blas-threads", 1)
    assert "xtrain.training.loop" in modules and too_early(modules, LATE) == set()


def test_garbage_is_collected_after_the_import():
    code = "import gc, sys; gc.set_threshold(500, 5, 5); import xtrain; xtrain.Tensor; print(gc.isenabled(), gc.get_freeze_count(), file=sys.stderr)"
    assert imported(code) == ["True", "0"]
    off = "import gc, sys; gc.disable(); import xtrain; xtrain.Tensor; print(gc.isenabled(), file=sys.stderr)"
    assert imported(off) == ["False"]


SERVE = """
import contextlib, sys
from xtrain.server import listen
def load(options):
    print(*sys.modules, file=sys.stderr)
    sys.exit()
listen.Options.load = load
listen.bound = listen.HttpProcess = lambda *_: contextlib.nullcontext([])
listen.serve(listen.Options(model="none"))
"""


def test_only_the_http_process_imports_its_packages():
    late = {
        "starlette",
        "uvicorn",
        "pydantic",
        "prometheus_client",
        "jinja2",
        "llguidance",
        "transformers",
    }
    modules = imported(SERVE)
    assert "xtrain.serving.engine" in modules and too_early(modules, late) == set()
