"""Several ranks. Checks that need them are in mpi/*.py and run under mpirun: few starts, many checks in each."""

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from checks import SLOW, only_slow

import xtrain
from xtrain.config import ModelConfig, TrainConfig, resolve
from xtrain.ddp import main
from xtrain.errors import UserError
from xtrain.nn.arena import ALIGN, arena_unit
from xtrain.nn.model import Transformer
from xtrain.parallel.ddp import STAGES, buckets
from xtrain.run_options import DP_STAGES
from xtrain.train import train
from xtrain.training.run_folder import _check_same
from xtrain.training.single_process import SINGLE_PROCESS

HERE = Path(__file__).parent
TEXT = HERE.parent / "data" / "grammar.txt"


def find_mpirun():
    """-> (mpirun of this Python's environment or from PATH, or None; the reason for None)"""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed"
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    return mpirun, "there is no mpirun"


MPIRUN, REASON = find_mpirun()
MPICH = MPIRUN is not None and "HYDRA" in subprocess.run(
    [MPIRUN, "--version"], capture_output=True, text=True
).stdout  # fmt: skip
mpi = lambda test: pytest.mark.mpi(pytest.mark.skipif(MPIRUN is None, reason=REASON)(test))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    more = {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "XTRAIN_CACHE": str(tmp_path_factory.getbasetemp() / "cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore", "COLUMNS": "200",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # more ranks than cores: MPICH's ranks sleep while they wait; Open MPI 5, Open MPI 4
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }  # fmt: skip
    return {**os.environ, **more}


def start(environment, ranks, *command, **options):
    if isinstance(command[0], Path):
        command = (sys.executable, *command)
    arguments = [MPIRUN, "-n", str(ranks), *map(str, command)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(arguments, env=environment, **pipes, **options)


def finish(job, seconds):
    try:
        out, err = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.kill()
        out, err = job.communicate()
        raise AssertionError(f"not ended after {seconds} s\n{out}\n{err}") from None
    return job.returncode, out, err


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()  # on Linux
    return sorted(map(int, found.split()))


MODULE = (sys.executable, "-m", "xtrain.ddp")


def command(folder, **more):
    given = {
        "data": TEXT, "out": folder, "name": "run", "preset": "tiny", "dim": 64, "layers": 2, "vocab-size": 300,
        "steps": 3, "batch": 4, "seq-len": 16, "eval-batches": 1, "sample-tokens": 2, "device": "cpu", **more,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in given.items()]


# ----------------------------------------------------------------------------- scripts full of checks
@mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "names, n",
    [
        (["equality", "refusals", *["resume"] * SLOW], 4),
        (["zero3"], 3),
        pytest.param(["fp8_scales"], 2, marks=only_slow),
    ],
    ids=lambda x: str(x).replace("'", ""),
)
def test_checks_of(names, n, environment, tmp_path):
    job = start(environment, n, HERE / "mpi" / "together.py", tmp_path, *names)
    code, out, err = finish(job, 300)
    print(out)
    assert code == 0, err
    assert out.count("ok ") > len(names), out


@mpi
@pytest.mark.gpu
@pytest.mark.slow
def test_on_gpus(environment, tmp_path):
    from xtrain.device import cupy

    count = cupy().cuda.runtime.getDeviceCount()
    if count < 2:
        # NCCL refuses two ranks on one GPU; test_copy_collectives.py plays the ranks with threads
        pytest.skip("needs two GPUs")
    code, out, err = finish(start(environment, count, HERE / "mpi" / "gpus.py", tmp_path), 500)
    print(out)
    assert code == 0, err


# ----------------------------------------------------------------------------- one rank fails
SAYS = {
    "raise": ("rank {}, step 4 failed", "Traceback", "ZeroDivisionError: injected"),
    "exit": ("rank {}, step 4 failed", "Traceback", "SystemExit: 0"),
    "kill": (),
    "leave": (),
    "hang": ("rank {}, step 4: no progress for 1 s", "time.sleep(1000)"),
    "stuck": ("rank {}, step 4: no progress for 1 s", "WORLD.Recv("),
    "stopped": ("the process of rank {} has not run for 3 s",),
    "frozen": (),  # nothing of the frozen rank can speak: its own timer or the other rank's watchdog ends the job
}
# Each fault in each of its places (exit is raised as any exception), then of the other rank and of more ranks
FAULTS = [(2, "raise step", 0), (2, "kill collective", 0), (2, "leave collective", 0)]
FAULTS += [(2, "hang step", 1), (2, "hang collective", 0), (2, "stuck collective", 0)]
FAULTS += [(2, "frozen step", 0), (4, "raise collective", 2)]
FAULTS += [(2, "stopped options", 0), (2, "stopped text", 1), (2, "stopped report", 0)]
MORE = [(2, "exit step", 1), (2, "stuck collective", 1), (2, "frozen step", 1)]
MORE += [(4, "kill step", 2), (4, "leave step", 2), (4, "stopped text", 2)]
MORE += [(2, "stopped step", 1), (2, "stopped validation", 0), (2, "stopped checkpoint", 1)]
FAULTS += [pytest.param(*fault, marks=only_slow) for fault in MORE]


@mpi
@pytest.mark.parametrize("n, what, rank", FAULTS)
def test_one_rank_fails(n, what, rank, environment, tmp_path):
    """All ranks end within seconds, not with 0; stderr names rank, step and place; the last checkpoint is complete."""
    fault, place = what.split()
    job = start(environment, n, HERE / "mpi" / "faults.py", tmp_path, fault, rank, place)
    code, out, err = finish(job, 60)
    seconds = time.time() - float((tmp_path / "failed_at").read_text())
    assert code != 0, out
    assert seconds < 20, err
    if fault in ("kill", "leave") and MPICH:
        assert err.count(f"rank {rank} ended in the middle of the run") == 1, err
    for sentence in SAYS[fault]:
        assert sentence.format(rank) in err, err
    assert fault != "frozen" or "Timeout" in err or "no progress for 1 s" in err, err
    assert fault != "stopped" or err.count("has not run") == 1, err
    if place not in ("step", "collective"):  # there are no checkpoints, or several
        return
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert saved.name == "step-000002" and Transformer.from_pretrained(saved)


STOPPED_AT_START = """
import os, signal, time
from xtrain.parallel import ranks, watchdog
ranks.START_SECONDS = watchdog.START_SECONDS = 3
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    {place} = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
with watchdog.AbortOnError(ranks.connect(), "start"):
    time.sleep(1000)
"""


@mpi
@pytest.mark.parametrize(
    "place, message",
    [
        ("ranks.Ranks.__init__", "_when_all_ranks_have_started"),
        ("watchdog.AbortOnError.__enter__", "the process of rank 1 has not run for 3 s"),
    ],
    ids=["after MPI_Init", "before the heartbeats"],
)
def test_a_rank_is_stopped_at_its_start(place, message, environment):
    script = STOPPED_AT_START.format(place=place)
    code, _, err = finish(start(environment, 2, sys.executable, "-c", script), 30)
    assert code != 0 and message in err, err


STOPPED_AT_EXIT = """
import os, signal, sys
from xtrain.parallel import ranks
ranks.END_SECONDS = 1
if ranks.connect().rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@mpi
def test_a_rank_is_stopped_before_mpi_finalize(environment):
    code, out, err = finish(start(environment, 2, sys.executable, "-c", STOPPED_AT_EXIT), 30)
    assert code != 0 and "Alarm clock" in out + err, out + err


@mpi
@pytest.mark.slow
def test_after_a_killed_rank_the_run_goes_on_exactly(environment, tmp_path):
    kind = {"vocab-size": 320, "steps": 1000, "batch": 8, "save-every": 2, "stop-at": 7}
    (tmp_path / "b").mkdir()
    code, out, _ = finish(
        start(environment, 2, HERE / "mpi" / "faults.py", tmp_path / "b", "kill", 1, "step"), 60
    )
    assert code != 0, out
    for name, more in (("a", []), ("b", ["--resume"])):
        job = start(environment, 2, *MODULE, *command(tmp_path / name, **kind), *more)
        code, out, err = finish(job, 60)
        assert code == 0, err
    assert "resumed from" in out
    for name in (
        "metrics.jsonl",
        *(f"checkpoints/step-000007/{n}" for n in ("model.safetensors", "manifest.json")),
    ):
        a, b = ((tmp_path / run / "run" / name).read_bytes() for run in "ab")
        assert a == b, name


@mpi
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_ends_well(name, environment, tmp_path):
    launcher = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    if name == "SIGTERM" and "Open MPI" in launcher:
        # its mpirun does the killing, whatever the ranks do: a documented limit, and SIGUSR1 is tested beside it
        pytest.skip("Open MPI kills the ranks 0.3 s after SIGTERM: use SIGUSR1")
    job = start(environment, 2, *MODULE, *command(tmp_path, steps=100000, zero=1))
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert job.poll() is None and time.monotonic() < until, finish(job, 1)
        time.sleep(0.05)
    number = getattr(signal, name)
    job.send_signal(number)
    try:
        out, err = job.communicate(timeout=10)
        code = job.returncode
    except subprocess.TimeoutExpired:
        # Open MPI 4.1.6 as Ubuntu 24.04 builds it forwards no signal: any one rank will do
        os.kill(children(job.pid)[-1], number)
        code, out, err = finish(job, 30)
    assert code == 0, err
    saved = max((tmp_path / "run" / "checkpoints").iterdir())
    assert f"stopped after step {int(saved.name[5:])}" in out
    steps = [m["step"] for m in map(json.loads, metrics.read_text().splitlines()) if "loss" in m]
    assert steps == list(range(1, int(saved.name[5:]) + 1))


# ----------------------------------------------------------------------------- the command line
@mpi
def test_a_run_says_everything_once(environment, tmp_path):
    code, out, err = finish(start(environment, 2, *MODULE, *command(tmp_path)), 60)
    assert code == 0 and not err, err
    assert "on CPU (NumPy), 2 ranks, fp32" in out
    assert (
        out.count("What next") == out.count("step 3: validation loss") == out.count("core (") == 1
    )
    (run,) = tmp_path.iterdir()
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert len(timing) == 3 and timing[0]["ranks"] == 2
    assert timing[0]["tokens_per_s"] == pytest.approx(2 * timing[0]["tokens_per_s_rank"])
    assert timing[1]["comm_exposed_ms"] > 0 and timing[1]["comm_hidden_ms"] >= 0
    options = json.loads((run / "config.json").read_text())["train"]
    assert (options["dp"], options["zero"], options["micro_batch"]) == ("bucket", None, 2)


@mpi
def test_every_command_runs_on_ranks(environment, tmp_path):
    """Under its own name: two ranks write one run, and the command that continues it is printed."""
    module = [sys.executable, "-m", "xtrain"]
    first = [*module, "train", *command(tmp_path, **{"stop-at": 2})]
    code, out, err = finish(start(environment, 2, *first), 60)
    assert code == 0 and not err, err
    assert "mpirun -n 2 python -m xtrain.train" in out
    data = tmp_path / "chats.jsonl"
    lines = [json.dumps({"prompt": "the ", "completion": f"{i} "}) + "\n" for i in range(8)]
    data.write_text("".join(lines))
    more = {
        "init": tmp_path / "run",
        "data": data,
        "name": "tuned",
        **dict.fromkeys(("preset", "dim", "layers", "vocab-size")),
    }
    arguments = [x for x in command(tmp_path, **more) if not x.endswith("=None")]
    code, out, err = finish(start(environment, 2, *module, "finetune", *arguments), 60)
    assert code == 0 and "7 examples and 1 held out" in err and err.count("\n") == 1, err
    assert (
        json.loads((tmp_path / "tuned" / "timing.jsonl").read_text().splitlines()[0])["ranks"] == 2
    )


@mpi
def test_one_rank_is_train(environment, tmp_path):
    from xtrain.train import main

    code, _, err = finish(start(environment, 1, *MODULE, *command(tmp_path / "a", zero=1)), 60)
    assert code == 0, err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XTRAIN_CACHE", environment["XTRAIN_CACHE"])
        assert main(command(tmp_path / "b")) == 0
    for name in ("metrics.jsonl", "samples.txt", "checkpoints/step-000003/state.json",
                 "checkpoints/step-000003/optimizer.safetensors", "checkpoints/step-000003/model.safetensors"):  # fmt: skip
        assert (tmp_path / "a/run" / name).read_bytes() == (tmp_path / "b/run" / name).read_bytes()


VERSION = "import sys, xtrain.version; xtrain.version.VERSION = '9'; from xtrain.ddp import main; sys.exit(main())"


@mpi
def test_a_rank_of_another_version(environment, tmp_path):
    """refusals.py has ranks with different options."""
    other = [sys.executable, "-c", VERSION]
    job = start(
        environment, 1, *MODULE, *command(tmp_path), ":", "-n", 1, *other, *command(tmp_path)
    )
    one_sentence(finish(job, 60), f"rank 1 has xtrain 9, rank 0 has {xtrain.__version__}")
    assert not list(tmp_path.iterdir())


@mpi
def test_an_unknown_option_is_said_once(environment, tmp_path):
    code, out, err = finish(start(environment, 2, *MODULE, "--nonsense", "1"), 60)
    assert code == 2 and not out and err.count("nonsense") == 1, err


def one_sentence(result, sentence):
    code, _, err = result
    ours = err.split("-" * 40)[
        0
    ].splitlines()  # Open MPI adds that a process ended with 2, between lines,
    (said,) = [
        line for line in ours if not line.startswith("[")
    ]  # and [machine:pid] what a sandbox forbids
    assert code == 2 and sentence in said, (code, err)


# ----------------------------------------------------------------------------- what is missing, in one sentence
@pytest.mark.parametrize("rank, sentences", [(0, 1), (1, 0)])
def test_no_mpi4py(rank, sentences, monkeypatch, capsys):
    """Said once within a machine: another one may have it. --help, which `xtrain completion` reads, does not start MPI."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("pip install -e '.[mpi]'") == sentences
    with contextlib.suppress(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("--bucket-mb") == sentences


@mpi
def test_a_rank_that_fails_before_mpi(environment):
    """MPICH does not notice, so the other ranks would wait in MPI_Init for ever."""
    script = "from xtrain.parallel import ranks as c; c.START_SECONDS = 0.5; c.connect()"
    job = start(environment, 1, sys.executable, "-c", script, ":", "-n", 1, "sh", "-c", "exit 3")
    code, _, err = finish(job, 30)
    assert code != 0 and ("_when_all_ranks_have_started" in err or "Exit code:    3" in err), err


def test_options_of_several_ranks_are_read_with_one():
    with pytest.raises(UserError, match="--bucket-mb must be a positive number"):
        train(TrainConfig(data="nowhere", bucket_mb=0))


# ----------------------------------------------------------------------------- buckets, and when they start
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 16, 24])
@pytest.mark.parametrize("nbytes", [1, 5000, 100_000, 1e9])
def test_buckets(world, nbytes):
    config = ModelConfig(vocab_size=61, dim=24, n_layers=3, n_heads=3, head_dim=8, max_seq_len=16)
    arena = Transformer(config, 0, "cpu", world=world).arena
    slices = buckets(arena.n_decay, arena.weights.size, world, nbytes)
    covered = sorted(slices)
    assert covered[0][0] == 0 and covered[-1][1] == arena.weights.size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(covered))
    for a, b in slices:
        assert (b - a) % (4 * world) == 0 and a % ALIGN == 0, "parts of whole 16 bytes"
        assert b <= arena.n_decay or a >= arena.n_decay, "decayed or not, never both"
        assert b - a <= max(arena_unit(world), nbytes / 4 + arena_unit(world))
    decayed = [p for p in slices if p[0] < arena.n_decay]
    assert decayed == sorted(decayed, reverse=True), "backward begins at the end"


class Journal:
    """Collectives that record their calls, and the gradients at the time of each."""

    ranks = SINGLE_PROCESS

    def __init__(self, grads):
        self.grads, self.events, self.then, self.idle = grads, [], {}, []

    def all_reduce(self, a, b, idle=False):
        assert (a, b) not in self.then, "sent twice"
        self.events.append((a, b))
        self.idle += [(a, b)] if idle else []
        self.then[a, b] = self.grads[a:b].copy()

    def join(self):
        self.events.append("join")

    def progress(self):
        self.events.append("backward")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("stage", ["overlap", "bucket"])
def test_a_piece_travels_when_it_is_complete_and_not_before(stage, recompute, tied):
    config = ModelConfig(
        vocab_size=61,
        dim=24,
        n_layers=3,
        n_heads=3,
        head_dim=8,
        max_seq_len=16,
        tie_embeddings=tied,
    )
    model = Transformer(config, 0, "cpu", recompute=recompute)
    journal = Journal(model.arena.grads)
    slices = buckets(model.arena.n_decay, model.arena.weights.size, 1, 10_000)
    sync = STAGES[stage](model, journal, slices, False)
    ids = np.random.default_rng(0).integers(0, 61, (2, 17))
    for _ in range(3):
        journal.events, journal.then, journal.idle = [], {}, []
        model.zero_grad()
        for last in (False, True):
            sync.backward(model.loss(ids[:, :-1], ids[:, 1:]), last)
    assert sorted(journal.then) == sorted(sync.slices), "each piece once"
    for (a, b), sent in journal.then.items():
        assert np.array_equal(sent, model.arena.grads[a:b]), "sent before it was complete"
    starts = [i for i, event in enumerate(journal.events) if isinstance(event, tuple)]
    steps = [i for i, event in enumerate(journal.events) if event == "backward"]
    assert starts[0] <= steps[1] if not tied else True, "the head is complete first"
    assert np.median(starts) < 0.8 * steps[-1], "most of it travels during backward"
    embedding = model.model.embed_tokens.weight  # its gradient is the last
    end = embedding.offset + embedding.size
    last = [(a, b) for a, b in sync.slices if a < end and embedding.offset < b]
    assert sorted(journal.idle) == sorted(last), "then nothing else is left to do"
    assert sorted(e for e in journal.events[-len(last) - 2 :] if isinstance(e, tuple)) == sorted(
        last
    )


def test_a_parameter_used_more_often_than_before_is_noticed():
    config = ModelConfig(vocab_size=61, dim=24, n_layers=1, n_heads=3, head_dim=8, max_seq_len=16)
    model = Transformer(config, 0, "cpu")
    journal = Journal(model.arena.grads)
    sync = STAGES["overlap"](model, journal, [], False)
    ids = np.zeros((1, 8), np.int32)
    sync.backward(model.loss(ids, ids), True)
    journal.then.clear()
    with pytest.raises(RuntimeError, match="more often than in the first step"):
        sync.backward(model.loss(ids, ids) + model.loss(ids, ids), True)


def test_a_parameter_that_the_first_step_did_not_use_is_sent_at_the_end():
    config = ModelConfig(vocab_size=61, dim=24, n_layers=2, n_heads=3, head_dim=8, max_seq_len=16)
    model = Transformer(config, 0, "cpu")
    mlp = model.model.layers[1].mlp
    journal = Journal(model.arena.grads)
    sync = STAGES["overlap"](model, journal, [], False)
    ids = np.zeros((1, 8), np.int32)
    for call in (lambda x: x * 1.0, mlp, mlp):
        model.model.layers[1].mlp = call
        journal.then.clear()
        model.zero_grad()
        sync.backward(model.loss(ids, ids), True)
        assert sorted(journal.then) == sorted(sync.slices)
    for (a, b), sent in journal.then.items():
        assert np.array_equal(sent, model.arena.grads[a:b]), "sent before it was complete"


def test_ranks_agree_on_the_order_although_backward_reaches_nothing_on_one():
    """Rank 0 decides it once, also for a rank that counted nothing."""
    model = Transformer(ModelConfig(vocab_size=61, dim=24, n_layers=1, n_heads=3, head_dim=8), 0, "cpu")  # fmt: skip
    asked = []
    journal = Journal(model.arena.grads)
    journal.ranks = types.SimpleNamespace(on_rank_0=lambda work: asked.append(1) or work())
    sync = STAGES["overlap"](model, journal, [], False)
    for _ in range(2):
        journal.then.clear()
        sync.backward(types.SimpleNamespace(backward=lambda: None), True)
    assert asked == [1]


@pytest.mark.parametrize(
    "seen, sentence",
    [
        (("a", "a", "b"), "rank 2 sees another x: give y"),
        (("a", "b", None), "rank 2 does not see x: give y"),
        ((None, "a", "a"), "rank 0 does not see x: give y"),
        ((None, None), None),
    ],
)
def test_a_rank_that_sees_another_folder_is_named(seen, sentence):
    expected = pytest.raises(UserError, match=f"^{sentence}$")
    with expected if sentence else contextlib.nullcontext():
        _check_same(Path("x"), None, "y", types.SimpleNamespace(gather=lambda _: list(seen)))


def test_the_names_of_the_stages():
    assert tuple(STAGES) == DP_STAGES


def test_shares_of_a_batch():
    config, _ = resolve(TrainConfig(preset="tiny", batch=12), False, world=3)
    assert config.micro_batch == 4
    with pytest.raises(UserError, match="not a multiple of the 8 ranks"):
        resolve(TrainConfig(preset="tiny", batch=12), False, world=8)


def test_cast_into():
    from xtrain.kernels.cast import BFLOAT16, cast_into

    x = np.linspace(-3, 3, 37, dtype=np.float32)
    half, back = np.empty(37, BFLOAT16), np.empty(37, np.float32)
    cast_into(half, x)
    cast_into(back, half)
    assert np.array_equal(back, x.astype(BFLOAT16).astype(np.float32))
    with pytest.raises(TypeError):
        cast_into(back, x)
