"""A run that is stopped and resumed equals one that was never stopped, byte for byte: logs, samples, checkpoints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checks import GPU
from rich.console import Console
from runs import DATA, assert_same_run, checkpoints, metrics, options, run
from signals import default_signals

from xtrain import blas
from xtrain.config import resolve
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.train import main
from xtrain.training import loop, preemption, run_folder
from xtrain.training.preemption import StopRequest, parse_seconds
from xtrain.training.run import Run

pytestmark = pytest.mark.usefixtures("cache")


PRECISIONS = ["fp32", "bf16"] if GPU else ["fp32"]
GRAPHS = [True, False] if GPU else [True]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    "recompute, micro_batch, experts",
    [("none", 4, None), ("attention", 4, None), ("block", 2, None), ("block", 2, 3)],
)
def test_resume_is_exact(tmp_path, precision, graph, recompute, micro_batch, experts):
    """Stopped at steps where nothing else is due: the stop adds neither a validation nor a sample."""
    kind = dict(
        precision=precision, graph=graph, recompute=recompute, micro_batch=micro_batch, eval_every=6,
        sample_every=8, save_every=9, experts=experts, expert_bias=True if experts else None,
    )  # fmt: skip
    whole = run(tmp_path / "a", **kind)
    for stop_at in (3, 7, 13):
        parts = run(tmp_path / "b", **kind, resume=stop_at > 3, stop_at=stop_at)
        assert checkpoints(parts)[-1] == f"step-{stop_at:06d}"
    run(tmp_path / "b", **kind, resume=True)
    assert_same_run(whole, parts)
    assert len((whole / "timing.jsonl").read_text().splitlines()) == 20
    assert len((parts / "timing.jsonl").read_text().splitlines()) == 20


def test_fifty_steps_twice(tmp_path):
    """Two runs with the same seed; on a GPU in bf16 with a CUDA graph."""
    kind = dict(steps=50, precision="bf16" if GPU else "fp32", save_every=50, eval_every=20)
    a, b = (run(tmp_path / name, **kind) for name in "ab")
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    assert_same_run(a, b)
    other = run(tmp_path / "c", **kind, seed=1, stop_at=1)
    assert metrics(a)[0]["loss"] != metrics(other)[0]["loss"]


def test_what_came_after_the_checkpoint_is_forgotten(tmp_path):
    """As if killed at step 17 in the middle of a line: later samples and numbers are made again."""
    kind = dict(sample_every=4, eval_every=5)
    whole = run(tmp_path / "a", **kind)
    parts = run(tmp_path / "b", **kind, stop_at=17)
    shutil.rmtree(parts / "checkpoints" / "step-000017")
    for name in ("metrics.jsonl", "timing.jsonl", "samples.txt"):
        os.truncate(parts / name, (parts / name).stat().st_size - 9)
    assert checkpoints(parts) == ["step-000010"]
    run(tmp_path / "b", **kind, resume=True)
    assert_same_run(whole, parts)


@pytest.mark.parametrize("damage", ["end", "middle", "all"])
def test_a_log_that_lost_lines_is_told(tmp_path, damage):
    """Readable lines are kept."""
    folder = run(tmp_path, stop_at=10)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = b'["no", "record"]\n' + b"\xff\0{\n" + b"3\n"
    left = {
        "end": (lines[:4] + [bad], [1, 2, 3, 4]),
        "middle": (lines[:2] + [bad] + lines[5:], [1, 2, 6, 7, 8, 9, 10, 10]),
        "all": ([bad, lines[0][:-4]], []),
    }
    content, steps = left[damage]
    (folder / "metrics.jsonl").write_bytes(b"".join(content))
    console = Console(record=True, width=1000)
    run(tmp_path, console, resume=True)
    missing = 10 - len(set(steps))
    assert f"metrics.jsonl lacks {missing} of the 10 steps so far" in console.export_text()
    assert [m["step"] for m in metrics(folder) if m["step"] <= 11] == [*steps, 11]


# ----------------------------------------------------------------------------- what must be the same
CHANGES = {
    "lr": (dict(lr=0.1), "lr was 0.0005, is 0.1"),
    "batch": (dict(batch=8, micro_batch=4), "batch was 4, is 8"),
    "seq_len": (dict(seq_len=16), "seq_len was 32, is 16"),
    "steps": (dict(steps=30), "steps was 20, is 30"),
    "seed": (dict(seed=3), "seed was 0, is 3"),
    "clip": (dict(clip=0.5), "clip was 1.0, is 0.5"),
    "vocab_size": (dict(vocab_size=300), "vocab_size was 320, is 300"),
    "dim": (dict(preset="tiny"), "dim was 64, is 128"),
}


@pytest.fixture(scope="module")
def stopped(cache, tmp_path_factory):
    return run(tmp_path_factory.mktemp("stopped"), stop_at=10)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_option_is_refused(stopped, tmp_path, name):
    changed, sentence = CHANGES[name]
    shutil.copytree(stopped, tmp_path / "run")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError) as error:
        run(tmp_path, resume=True, **changed)
    fits = name not in ("vocab_size", "dim")  # the weights of a checkpoint have one shape
    assert sentence in str(error.value) and ("--allow-change" in str(error.value)) is fits
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["lr", "batch", "seq_len", "steps", "seed", "clip"])
def test_a_change_can_be_allowed(stopped, tmp_path, name):
    shutil.copytree(stopped, tmp_path / "run")
    changed = CHANGES[name][0]
    folder = run(tmp_path, resume=True, allow_change=(name.replace("_", "-"),), **changed)
    assert metrics(folder)[-1]["step"] == changed.get("steps", 20)


def test_another_text(stopped, tmp_path):
    """It is tokenized with the tokenizer of the checkpoint: the weights belong to it."""
    shutil.copytree(stopped, tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text((DATA / "grammar.txt").read_text() * 2)
    with pytest.raises(
        UserError,
        match=r"the text is not the same \(sha256 was \w{16}, is \w{16}\).*--allow-change data$",
    ):
        run(tmp_path, resume=True, data=str(other))
    folder = run(tmp_path, resume=True, data=str(other), allow_change=("data",))
    assert metrics(folder)[-1]["step"] == 20
    tokenizers = [folder / f"checkpoints/step-0000{step}/tokenizer.json" for step in (10, 20)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_another_tokenizer(stopped, tmp_path):
    """Nothing suggests it; who insists can have it."""
    shutil.copytree(stopped, tmp_path / "run")
    Tokenizer.train([(DATA / "grammar.txt").read_text()[:9000]], 320).save(tmp_path / "other")
    kind = dict(resume=True, tokenizer=str(tmp_path / "other" / "tokenizer.json"))
    with pytest.raises(
        UserError, match=r"the tokenizer is not the same.*omit --tokenizer"
    ) as error:
        run(tmp_path, **kind)
    assert "--allow-change" not in str(error.value)
    with pytest.raises(UserError, match=r"omit --tokenizer.*--allow-change lr$"):
        run(tmp_path, **kind, lr=0.1)
    folder = run(tmp_path, **kind, allow_change=("tokenizer",))
    assert metrics(folder)[-1]["step"] == 20


# ----------------------------------------------------------------------------- options that are not given again
def command(out, *more):
    return main(["--out", str(out), "--name", "run", "--resume", *map(str, more)])


def stored(folder):
    return json.loads((folder / "config.json").read_text())["train"]


def test_the_name_is_enough(stopped, tmp_path, capsys):
    shutil.copytree(stopped, tmp_path / "run")
    assert command(tmp_path) == 0, capsys.readouterr().err
    assert_same_run(tmp_path / "run", run(tmp_path / "whole"))
    before, after = stored(stopped), stored(tmp_path / "run")
    mine = {"out", "resume", "stop_at"}
    assert {k: v for k, v in before.items() if k not in mine} == {k: v for k, v in after.items() if k not in mine}  # fmt: skip


def test_options_that_are_given_count(stopped, tmp_path, capsys):
    """Also those that have their default value, which is not the run's."""
    shutil.copytree(stopped, tmp_path / "run")
    assert command(tmp_path, "--lr", 0.003) == 2
    assert "lr was 0.0005, is 0.003" in capsys.readouterr().err
    assert command(tmp_path, "--clip", 1.0, "--eval-every", 7, "--stop-at", 12) == 0
    assert stored(tmp_path / "run")["eval_every"] == 7
    assert checkpoints(tmp_path / "run")[-1] == "step-000012"
    assert command(tmp_path) == 0, "--stop-at counts for one process"
    assert checkpoints(tmp_path / "run")[-1] == "step-000020"


def test_an_option_that_needs_one_of_the_run(tmp_path, capsys):
    """--decay-fraction needs --schedule wsd, which is the run's."""
    run(tmp_path, schedule="wsd", steps=4, stop_at=2)
    assert command(tmp_path, "--decay-fraction", 0.5) == 2
    assert "decay_fraction was 0.2, is 0.5: " in capsys.readouterr().err
    assert command(tmp_path, "--decay-fraction", 0.5, "--allow-change", "decay_fraction") == 0


def test_an_allowed_change_stays_allowed(stopped, tmp_path, capsys):
    """Killed after the change, before the next checkpoint."""
    shutil.copytree(stopped, tmp_path / "run")
    assert command(tmp_path, "--lr", 0.001, "--allow-change", "lr", "--stop-at", 11) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-000011")
    assert command(tmp_path, "--stop-at", 11) == 0, capsys.readouterr().err
    assert metrics(tmp_path / "run")[-1]["lr"] > 0.0005
    shutil.rmtree(tmp_path / "run/checkpoints/step-000011")
    assert command(tmp_path, "--lr", 0.002) == 2, "another change is another decision"
    assert "lr was 0.0005, is 0.002" in capsys.readouterr().err


def test_the_last_run_without_a_name(tmp_path, capsys):
    """tiny, tiny-2: the newest continues, with its own options."""
    for steps in (6, 4):
        run(tmp_path, name=None, preset="tiny", steps=steps, stop_at=2, micro_batch=2)
    assert main(["--out", str(tmp_path), "--preset", "tiny", "--resume"]) == 0, (
        capsys.readouterr().err
    )
    assert (
        metrics(tmp_path / "tiny-2")[-1]["step"] == 4
        and stored(tmp_path / "tiny-2")["micro_batch"] == 2
    )
    assert metrics(tmp_path / "tiny")[-1]["step"] == 2
    assert main(["--out", str(tmp_path), "--name", "tiny-3", "--resume"]) == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "no JSON", "wrong types"])
def test_without_the_stored_options(stopped, tmp_path, capsys, damage):
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    if damage == "wrong types":
        record = json.loads(path.read_text())
        record["train"] |= {
            "lr": "fast",
            "batch": True,
            "graph": 3,
            "device": "abacus",
            "steps": [1],
        }
        path.write_text(json.dumps(record))
    else:
        path.unlink() if damage == "missing" else path.write_text("{")
    assert command(tmp_path, "--data", DATA / "grammar.txt") == 2
    error = capsys.readouterr().err
    assert "cannot resume" in error and "Traceback" not in error
    assert ("is missing or damaged: options that are not given have their defaults" in error) is (
        damage != "wrong types"
    )


def test_without_the_stored_options_other_options_are_refused_before_the_text_is_read(
    stopped, tmp_path, capsys, monkeypatch
):
    """It would be the default text, which takes long."""
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    monkeypatch.setattr(loop, "_read_text", None)
    assert command(tmp_path) == 2
    missing, refused = capsys.readouterr().err.splitlines()
    assert "config.json is missing or damaged" in missing
    assert re.search(r"steps was 20, is \d+; batch was 4, is \d+", refused)  # a GPU's are others
    assert "--allow-change" in refused


def test_another_model_is_refused(stopped, tmp_path, capsys):
    """The weights are those of the checkpoint."""
    shutil.copytree(stopped, tmp_path / "run")
    assert command(tmp_path, "--init", tmp_path) == 2
    said = capsys.readouterr().err
    assert f"--init was not given, is {tmp_path}: omit --init, because" in said
    started = dict(init=str(stopped), preset="tiny", vocab_size=None, name="second", stop_at=2)
    run(tmp_path, **started)
    second = ["--out", str(tmp_path), "--name", "second", "--resume"]
    for given, says in (
        (["--init", str(tmp_path / "run")], f"--init was {stopped}"),
        (["--preset", "dim384"], "--preset was tiny, is dim384: omit --preset, because the model"),
    ):
        assert main([*second, *given]) == 2 and says in capsys.readouterr().err
    assert main([*second, "--init", str(stopped), "--preset", "tiny", "--stop-at", "3"]) == 0


def test_a_tokenizer_that_has_changed_since_is_told(tmp_path, capsys):
    """The run keeps the one that its weights belong to."""
    text = (DATA / "grammar.txt").read_text()
    Tokenizer.train([text], 320).save(tmp_path / "own")
    run(tmp_path, tokenizer=str(tmp_path / "own"), steps=4, stop_at=2)
    assert command(tmp_path, "--stop-at", 3) == 0
    assert "warning" not in capsys.readouterr().out
    Tokenizer.train([text[:9000]], 320).save(tmp_path / "own")
    assert command(tmp_path) == 0
    assert "own is not the tokenizer of the run any more" in capsys.readouterr().out


def test_a_run_of_several_ranks_continues_on_one(stopped, tmp_path, capsys):
    """A micro-batch that was the whole share of a rank is the whole share again."""
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    record["machine"]["ranks"], record["train"]["micro_batch"] = 2, 2
    path.write_text(json.dumps(record))
    assert command(tmp_path, "--stop-at", 11) == 0, capsys.readouterr().err
    assert stored(tmp_path / "run")["micro_batch"] == 4


def test_the_precision_stays(stopped, tmp_path, monkeypatch):
    """Also in a run that an earlier version began, in which fp32 was the default."""
    shutil.copytree(stopped, tmp_path / "run")
    config, _ = resolve(options(tmp_path, resume=True, precision="auto"), gpu=True)
    folder = run_folder.choose(config, "run", print)
    assert run_folder.with_first_options(config, folder).precision == "fp32"
    folder.saved.state["options"]["precision"] = "bf16"
    assert run_folder.with_first_options(config, folder).precision == "bf16"
    config = replace(config, precision="fp32")
    assert run_folder.with_first_options(config, folder).precision == "fp32", "given: refused later"


@pytest.mark.skipif(GPU or (blas.threads() or 0) < 1 or blas.cores() < 2, reason="needs two cores")
def test_the_threads_stay(tmp_path, monkeypatch):
    """The number decides the last bits: a run keeps that of its checkpoint."""
    for name in blas.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(blas, "fastest_threads", lambda *shape: 2)
    whole = run(tmp_path / "a", steps=5)
    parts = run(tmp_path / "b", steps=5, stop_at=3)
    assert stored(parts)["blas_threads"] == 2
    monkeypatch.setattr(blas, "fastest_threads", lambda *shape: 1)
    console = Console(record=True, width=1000)
    run(tmp_path / "b", console, steps=5, resume=True)
    assert "matrix products on 2 of" in console.export_text()
    assert_same_run(whole, parts)
    console = Console(record=True, width=1000)
    other = run(tmp_path / "d", steps=5, stop_at=3)
    assert stored(other)["blas_threads"] == 1
    run(tmp_path / "d", console, steps=5, resume=True, blas_threads=2)
    assert "blas_threads was 1, is 2: the last digits may differ" in console.export_text()
    assert stored(other)["blas_threads"] == 2


def test_a_name_that_cannot_be_allowed(stopped, tmp_path, capsys):
    shutil.copytree(stopped, tmp_path / "run")
    assert command(tmp_path, "--allow-change", "speed") == 2
    assert "--allow-change speed is not known: choose from" in capsys.readouterr().err


def test_another_machine_is_told(stopped, tmp_path, monkeypatch):
    shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.setattr(Run, "made_on", lambda self: {"device": "abacus", "ranks": 1, "zero": 0})
    console = Console(record=True, width=1000)
    run(tmp_path, console, resume=True)
    text = console.export_text()
    assert "device was" in text and ", is abacus: the last digits may differ" in text


# ----------------------------------------------------------------------------- stopping early
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
@default_signals()
def test_a_signal_finishes_the_step_and_saves(tmp_path, name):
    step, before = Run.step, signal.getsignal(getattr(signal, name))

    def interrupted(self):
        if self.done == 2:
            os.kill(os.getpid(), getattr(signal, name))
        return step(self)

    console = Console(record=True, width=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", interrupted)
        parts = run(tmp_path / "b", console)
    assert checkpoints(parts) == ["step-000003"]
    assert f"stopped after step 3 ({name})" in console.export_text()
    assert signal.getsignal(getattr(signal, name)) == before
    assert [m["step"] for m in metrics(parts)] == [1, 2, 3], (
        "no validation: there may be no time for it"
    )
    run(tmp_path / "b", resume=True)
    assert_same_run(run(tmp_path / "a"), parts)


def test_nohup_stays():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_at_once(tmp_path, monkeypatch):
    """Even while a checkpoint is being written."""
    import threading

    from xtrain.training import checkpoint

    forever, step = threading.Event(), Run.step

    def interrupted(self):
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the handler runs between two lines of Python
        return step(self)

    monkeypatch.setattr(checkpoint, "write", lambda *_: forever.wait())
    monkeypatch.setattr(Run, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, save_every=2)
    forever.set()
    assert not (tmp_path / "run" / "checkpoints").exists()


@default_signals()
def test_before_the_first_step_any_signal_ends_it(tmp_path, monkeypatch, capsys):
    from xtrain.training import loop as module

    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        stop = lambda *_, **__: os.kill(os.getpid(), getattr(signal, name)) or time.sleep(0.1)  # noqa: B023
        monkeypatch.setattr(module, "prepare", stop)
        assert main(["--out", str(tmp_path), "--preset", "tiny"]) == 130
        assert "interrupted before training began" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "steps, words",
    [(0, "no checkpoint was written yet"), (2, "the last checkpoint is intact: {}/step-00000")],
)
def test_an_interrupt_says_what_is_saved(tmp_path, monkeypatch, capsys, steps, words):
    step = Run.step

    def interrupted(self):
        if self.done == steps:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Run, "step", interrupted)
    arguments = {"--out": tmp_path, "--name": "a", "--data": DATA / "grammar.txt", "--steps": 4, "--batch": 2,
                 "--seq-len": 16, "--vocab-size": 300, "--save-every": 1, "--device": "cpu"}  # fmt: skip
    assert main([str(x) for pair in arguments.items() for x in pair]) == 130
    where = tmp_path / "a/checkpoints"
    assert f"interrupted; {words.format(where)}" in capsys.readouterr().err


def test_the_command_line_ends_with_0(tmp_path):
    """A real process and a real SIGTERM."""
    small = [
        "--preset=tiny",
        "--vocab-size=300",
        "--batch=2",
        "--seq-len=16",
        "--eval-batches=1",
        "--sample-tokens=2",
    ]
    where = [
        f"--data={DATA / 'grammar.txt'}",
        f"--out={tmp_path}",
        "--name=run",
        "--steps=100000",
        "--device=cpu",
    ]
    paths = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": paths}
    start = [sys.executable, "-m", "xtrain.train", *small, *where]
    job = subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 200):
        assert job.poll() is None and time.monotonic() < until, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 0, said
    last = metrics(tmp_path / "run")[-1]["step"]
    assert checkpoints(tmp_path / "run") == [f"step-{last:06d}"]
    assert f"stopped after step {last} (SIGTERM)" in " ".join(said.split())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"report.html", "loss.png"}, "there may be no time for pictures"


def test_the_clock_of_the_time_limit_begins_with_the_process():
    code = "import time; a = time.monotonic(); time.sleep(1.5); import xtrain.training.preemption as s; print(a - s.STARTED)"
    paths = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert -0.1 < float(done.stdout) < 60, done.stderr


class Clock:
    """Every call returns a time `tick` seconds later."""

    def __init__(self, start, tick):
        self.now, self.tick = start, tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.mark.parametrize(
    "limit, save, expected", [(100, 0, 95), (100, 20, 55), (10, 0, 5), (1, 0, 1)]
)
def test_time_limit(monkeypatch, limit, save, expected):
    """A step takes 1 s; there must be time for twice another step and a checkpoint, and for the exit."""
    monkeypatch.setattr(preemption, "STARTED", 1000.0)  # a whole number: the sums are exact
    stop = StopRequest(limit, Clock(preemption.STARTED, 1.0))
    stop.begin(save * preemption.BYTES_PER_SECOND)
    steps = 1
    while not stop.after_step():
        steps += 1
    assert steps == expected and stop.reason == "--time-limit"


def test_a_slow_checkpoint_is_counted(monkeypatch):
    monkeypatch.setattr(preemption, "STARTED", 1000.0)
    stop = StopRequest(100, Clock(preemption.STARTED, 1.0))
    stop.begin(0)
    assert not stop.after_step(3.0) and stop.slowest_save == 3.0 and not stop.after_step(1.0)
    assert stop.slowest_save == 3.0 and stop.slowest_step == 1.0


def test_a_run_with_a_time_limit(tmp_path, monkeypatch):
    """Every reading of the clock is 3 s later: after 11 steps there is no time for two more."""
    clock = Clock(preemption.STARTED, 3.0)
    monkeypatch.setattr(preemption, "BYTES_PER_SECOND", 1e30)
    monkeypatch.setattr(StopRequest.__init__, "__defaults__", (None, clock))
    console = Console(record=True, width=1000)
    parts = run(tmp_path / "b", console, time_limit="0:00:40", save_every=100)
    assert "stopped after step 11 (--time-limit)" in console.export_text()
    assert checkpoints(parts) == ["step-000011"]


@pytest.mark.parametrize(
    "text, value",
    [
        ("90", 90),
        ("1.5", 1.5),
        ("90:00", 5400),
        ("1:30:00", 5400),
        ("1-00:00:01", 86401),
        (None, None),
    ],
)
def test_times(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "-5", "1:", "1-5", "0", "0:00", "1:2:3:4", "nan", "inf", "1e3"]
)
def test_no_times(text, tmp_path):
    with pytest.raises(UserError, match="--time-limit"):
        parse_seconds(text)
