"""Kill training runs at random times, resume them, and compare with a run that was never killed.

    python tests/training/kills.py --kills 100 --record bench/results/kills.jsonl

A process trains, is killed (SIGKILL) at a wall time drawn uniformly from [0, a whole training), and is started again with
--resume, until the run is done; then the next run begins. After every kill and at every end:

- each checkpoint that has its name is whole: all checksums are right;
- no checkpoint that was there before has been lost, and the next process goes on from the newest;
- up to that step metrics.jsonl and samples.txt are those of the run that was never killed;
- what an earlier kill had left half-written is gone after the next checkpoint;
- a finished run equals the other byte for byte (numbers, samples, checkpoints) and has nothing else in its folder.

Every second run is on a disk with room for two checkpoints and a half, so that old ones are removed early.
A process that exports two models in turn into one folder is killed as often: the folder is always one of the two.
"""

import argparse
import datetime
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
from faults import SmallDisk
from runs import SHAPE, assert_same_run, checkpoints, options

from xtrain.config import PRESETS, ModelConfig, Preset
from xtrain.formats import huggingface, saved_runs
from xtrain.formats.manifest import MANIFEST, verify
from xtrain.nn.model import Transformer
from xtrain.train import train
from xtrain.training.loop import Loop
from xtrain.training.run_log import RunLog

PRESETS["killed"] = Preset({**SHAPE, "dim": 128, "hidden_dim": 384}, PRESETS["tiny"].train)
OPTIONS = dict(
    preset="killed", steps=30, save_every=2, eval_every=4, sample_every=5, keep=2, batch=2, device="cpu"
)  # fmt: skip
LOGS = ("metrics.jsonl", "samples.txt")


class Worker:
    """A process that trains. It reports the step at which it starts, and when the last step is done.

    room: bytes for its checkpoints.
    """

    def __init__(self, out: Path, room: int | None = None):
        reader, writer = os.pipe()
        resume = (out / "run" / "config.json").exists()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _child(out, resume, room, writer)
        os.close(writer)
        self.pipe, self.alive = os.fdopen(reader, "rb", buffering=0), True
        self.first_step = int.from_bytes(self.pipe.read(4), "little")
        self.started = time.monotonic()

    def wait(self, seconds: float | None) -> bool:
        """-> has it ended within `seconds`?"""
        ready, _, _ = select.select([self.pipe], [], [], seconds)
        if ready and self.alive:
            self._gone()
            assert self.code == 0, f"training failed with {self.code}"
        return bool(ready)

    def kill(self) -> bool:
        """-> was it killed? (False if it had just ended.)"""
        os.kill(self.pid, signal.SIGKILL)
        self._gone()
        return self.code == -signal.SIGKILL

    def _gone(self):
        _, status = os.waitpid(self.pid, 0)
        self.code, self.alive = os.waitstatus_to_exitcode(status), False
        self.seconds = time.monotonic() - self.started


class Patch:
    """pytest.MonkeyPatch in a process that ends soon."""

    setattr = staticmethod(setattr)


def _child(out, resume, room, pipe):
    """The pipe closes when this process ends for any reason."""
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        if room is not None:
            SmallDisk(Patch, out / "run", room)
        RunLog.picture = lambda self: None  # slower than everything else together
        begin = Loop.__call__

        def begins(loop):
            os.write(pipe, loop.run.done.to_bytes(4, "little"))
            begin(loop)

        Loop.__call__ = begins
        train(options(out, **OPTIONS, resume=resume))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Killed:
    """A run that is killed again and again. whole: the folder of the same run without kills."""

    def __init__(self, out: Path, whole: Path, full: bool = False):
        self.out, self.folder, self.whole = out, out / "run", whole
        sizes = [p.stat().st_size for p in saved_runs.folders(whole)[-1].iterdir()]
        self.room = int(2.5 * sum(sizes)) if full else None
        self.newest, self.strays = 0, set()

    def check(self, first_step: int) -> None:
        """Check the folder after a process that started at first_step has ended."""
        assert first_step == self.newest, (
            f"went on from {first_step}, the checkpoint was {self.newest}"
        )
        there = saved_runs.folders(self.folder)
        for folder in there:
            verify(folder)
        newest = int(there[-1].name[5:]) if there else 0
        assert newest >= self.newest, f"checkpoint {self.newest} is lost"
        if newest:
            self.check_logs(there[-1])
        left = {
            (p.name, p.stat().st_ino)
            for p in (*self.folder.rglob("*.tmp"), *self.folder.rglob(".step-*"))
        }
        if newest > self.newest:
            assert not left & self.strays, f"{left & self.strays} outlived a checkpoint"
        self.newest, self.strays = newest, left

    def check_logs(self, saved: Path) -> None:
        step = int(saved.name[5:])
        samples = json.loads((saved / "state.json").read_text())["logs"]["samples.txt"]
        lengths = {"samples.txt": samples, "metrics.jsonl": self._length_until(step)}
        for name in LOGS:
            mine, other = (
                (f / name).read_bytes() if (f / name).exists() else b""
                for f in (self.folder, self.whole)
            )
            assert mine[: lengths[name]] == other[: lengths[name]], (
                f"{name} differs before step {step}"
            )
            assert len(mine) >= lengths[name], f"{name} has lost lines"

    def _length_until(self, step):
        lines = (self.whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return sum(len(line) for line in lines if json.loads(line)["step"] <= step)

    def phase(self) -> str:
        """What the checkpoint writer was doing when the process was killed."""
        writing = [
            p
            for p in self.folder.glob("checkpoints/.step-*.tmp")
            if not p.name.endswith(".old.tmp")
        ]
        if list(self.folder.glob("checkpoints/.step-*.old.tmp")):
            return "removing an old checkpoint"
        if not writing:
            return "nothing"
        names = {p.name for p in writing[0].iterdir()}
        for name, phase in (
            (MANIFEST, "syncing and renaming"), ("state.json", "computing checksums"),
            ("optimizer.safetensors", "writing moments"), ("model.safetensors", "writing weights"),
        ):  # fmt: skip
            if name in names:
                return phase
        return "starting"

    def check_end(self) -> None:
        assert_same_run(self.folder, self.whole)
        saved = [checkpoints(f) for f in (self.folder, self.whole)]
        assert saved[0] == (saved[1] if self.room is None else saved[1][-2:]), saved
        names = [sorted(p.name for p in f.iterdir()) for f in (self.folder, self.whole)]
        assert names[0] == names[1], names


def kill_runs(kills: int, seed: int, root: Path) -> dict:
    """-> the fields of the record"""
    rng = np.random.default_rng(seed)
    worker = Worker(root / "whole")
    assert worker.wait(600)
    whole, horizon = root / "whole" / "run", worker.seconds
    phases, times, redone, runs, run = Counter(), [], [], 0, Killed(root / "killed", whole)
    while len(times) < kills or run.newest:
        worker = Worker(run.out, run.room)
        at = rng.uniform(0, horizon) if len(times) < kills else 600
        if worker.wait(at) or not worker.kill():
            run.check(worker.first_step)
            run.check_end()
            shutil.rmtree(run.out)
            runs, run = runs + 1, Killed(run.out, whole, full=run.room is None)
            continue
        times.append(at)
        lines = run.folder / "metrics.jsonl"
        reached = lines.read_text().count('"lr"') if lines.exists() else 0
        run.check(worker.first_step)
        redone.append(max(0, reached - run.newest))
        phases[run.phase()] += 1
    share, _ = np.histogram(np.array(times) / horizon, bins=10, range=(0, 1))
    return {
        "kills": len(times), "runs": runs, "in_writer": len(times) - phases["nothing"],
        "writer_was": dict(phases.most_common()), "kill_times_tenths": share.tolist(),
        "training_s": round(horizon, 2), "steps_done_again_mean": float(np.mean(redone)),
        "steps_done_again_max": int(max(redone)),
    }  # fmt: skip


def kill_exports(kills: int, seed: int, root: Path) -> dict:
    """-> the fields of the record"""
    rng, folder, found = np.random.default_rng(seed), root / "export" / "model", Counter()
    models = [Transformer(ModelConfig(320, 128, n, 2), seed=n) for n in (1, 2)]
    weights = [{name: x.numpy() for name, x in model.named_parameters()} for model in models]
    models[0].save_pretrained(folder)
    (folder / "README.md").write_text("mine")
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            while True:
                for model in models:
                    huggingface.save(model, folder, max_shard_bytes=500_000)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        held = {n: x.numpy() for n, x in Transformer.from_pretrained(folder).named_parameters()}
        same = [w for w in weights if w.keys() == held.keys()]
        assert all(np.array_equal(x, held[name]) for name, x in same[0].items())
        assert (folder / "README.md").read_text() == "mine"
        found["killed"] += 1
        found["with strays"] += len(list(folder.parent.iterdir())) > 1
        found["new"] += same[0] is weights[1]
    models[0].save_pretrained(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    return {"exports": dict(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", type=Path, help="append what happened to this file, a JSON line"
    )
    arguments = parser.parse_args()
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # a process with threads should not fork
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XTRAIN_CACHE"] = folder + "/cache"
        found = kill_runs(arguments.kills, arguments.seed, Path(folder))
        found |= kill_exports(arguments.kills, arguments.seed, Path(folder))
    print(json.dumps(found))
    if arguments.record:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        about = {
            "bench": "kills", "name": "SIGKILL while training", "value": found["kills"], "unit": "kills survived",
            "versions": {"python": platform.python_version(), "numpy": np.__version__}, "gpu": None,
            "commit": commit, "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        with open(arguments.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(about | found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
