"""Bad input: one sentence from one rank, and exit code 2 on all.   mpirun -n 2 python together.py FOLDER refusals"""

import contextlib
import errno
import io
import os
import shutil
from pathlib import Path

from common import SHAPE, TEXT, WORLD

from xtrain.config import ModelConfig
from xtrain.ddp import main
from xtrain.files import cannot_write
from xtrain.nn.model import Transformer
from xtrain.training import checkpoint
from xtrain.training.run import Run

GOOD = {
    "data": TEXT, "name": "run", "vocab-size": 300, "steps": 3, "batch": 4, "seq-len": 16, **SHAPE,
    "eval-batches": 1, "sample-tokens": 2, "device": "cpu",
}  # fmt: skip
BAD = [
    ({"batch": 5}, "--batch 5 is not a multiple of the 4 ranks"),
    ({"batch": 16, "micro-batch": 8}, "--batch 16 is not a multiple of 4 ranks x --micro-batch 8"),
    ({"data": "/nowhere"}, "/nowhere"),
    ({"zero": 1, "dp": "none"}, "choose another --dp than none"),
    ({"bucket-mb": 0}, "--bucket-mb must be a positive number, got 0"),
    ({"watchdog": -1}, "--watchdog must be between 0 (never) and"),
    ({"lr": "nan"}, "--lr must be a positive number, got nan"),  # the ranks agree on it
    (
        {"lr": 1e30, "clip": 0, "warmup": 0, "max-skips": 2},
        "2 steps in a row were skipped (--max-skips), the last at step 3: the gradient norm is nan. First "
        "value that is not finite: rank 0: outside the layers, ResidualRMSNorm with model.norm.weight, backward (1024 NaN",
    ),
    (
        {"lr": 1e30, "clip": 0, "warmup": 0, "max-skips": 1, "dp": "none", "steps": 9},
        "ResidualRMSNorm with model.norm.weight, backward",
    ),
    (
        {"lr": 1e30, "clip": 0, "warmup": 0, "max-skips": 1, "zero": 1},
        "ResidualRMSNorm with model.norm.weight, backward",
    ),
    (
        {"dp": "none", "check-ranks": 2},
        "after step 2 the parameters of rank 1 differ from those of rank 0",
    ),
    ({"out": "/proc/nowhere"}, "cannot be written"),
    ({"lr": 1e-3 * (1 + WORLD.rank)}, "rank 1 has --lr 0.002, rank 0 has 0.001"),
    ({"resume": True}, "no checkpoint"),
]


def everything_is_said_once(folder):
    for i, (options, sentence) in enumerate(BAD):
        given = {**GOOD, "out": folder / str(i), **options}
        arguments = [f"--{k}={v}" if v is not True else f"--{k}" for k, v in given.items()]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(arguments)
        assert code == 2, options
        if WORLD.rank == 0:
            assert sentence in said.getvalue() and said.getvalue().count("\n") == 1, said.getvalue()
        else:
            assert not said.getvalue(), said.getvalue()


@contextlib.contextmanager
def another_machine(folder):
    """Ranks 2 and 3 work in another folder, where different files have the same names."""
    here, mine = os.getcwd(), folder / f"machine {WORLD.rank // 2}"
    mine.mkdir(parents=True, exist_ok=True)
    os.chdir(mine)
    yield
    os.chdir(here)


def what_is_not_the_same_everywhere(folder):
    nothing, share = lambda: None, "give a folder --out that all machines share"
    for prepare, options, sentence in [
        (nothing, {"data": "text.txt", "out": folder / "out"}, "rank 2 has text "),
        (nothing, {"out": "runs", "stop-at": 1}, None),
        (nothing, {"out": "runs", "resume": True}, f"rank 2 does not see {SAVED}: {share}"),
        (an_empty_folder, {"out": "runs", "resume": True}, f"rank 2 does not see {SAVED}: {share}"),
        (another_run, {"out": "runs", "resume": True}, f"rank 2 sees another {SAVED}: {share}"),
        (only_the_options, {"out": "runs", "resume": True, "stop-at": 1}, None),
        (
            another_model,
            {"out": "runs", "name": "on", "init": "base", "zero": 3},
            "rank 2 sees another base: ",
        ),
        (no_model, {"out": "runs", "name": "on", "init": "base"}, "rank 2 does not see base: "),
    ]:
        given = {**GOOD, **options}
        if "resume" in options:  # the others are those of the run, which only rank 0 and 1 see
            given = {**{k: GOOD[k] for k in ("data", "name", "device")}, **options}
        if "init" in options:
            given = {k: x for k, x in given.items() if k not in (*SHAPE, "vocab-size")}
        arguments = [f"--{k}={v}" if v is not True else f"--{k}" for k, v in given.items()]
        said = io.StringIO()
        with (
            another_machine(folder / "not the same"),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            Path("text.txt").write_bytes(TEXT.read_bytes()[WORLD.rank // 2 :])
            if WORLD.rank % 2 == 0:
                prepare()
            WORLD.Barrier()
            code = main(arguments)
        text = said.getvalue()
        assert code == (2 if sentence else 0), (options, text)
        if WORLD.rank == 0 and sentence:
            assert sentence in text and text.count("\n") == 1, text
        else:
            assert not text, text
    assert not (folder / "out").exists(), "nothing is trained on two texts"
    own = folder / "not the same" / f"machine {WORLD.rank // 2}" / "runs"
    assert (own / SAVED.relative_to("runs")).exists() == (WORLD.rank < 2), (
        "resumed at its beginning"
    )


SAVED = Path("runs/run/checkpoints/step-000001")


def an_empty_folder():
    Path("runs/run").mkdir(parents=True, exist_ok=True)


def another_run():
    if WORLD.rank == 2:
        SAVED.mkdir(parents=True)
        (SAVED / "manifest.json").write_text("{}")


def another_model():
    config = ModelConfig(vocab_size=300, dim=64, n_layers=2, n_heads=1, head_dim=64, max_seq_len=16)
    Transformer(config, WORLD.rank // 2).save_pretrained("base")


def no_model():
    if WORLD.rank == 2:
        shutil.rmtree("base")


def only_the_options():
    """The run was stopped before its first checkpoint: it does not matter who sees its folder."""
    shutil.rmtree(SAVED.parent if WORLD.rank == 0 else "runs")


def what_is_known_with_the_model(folder):
    """What decides the numbers and is known after the options were compared is named, also where weights differ."""
    options_of = Run.resume_options
    for name, sentence in [
        ("teacher", "rank 2 has teacher 1, rank 0 has 0: all ranks need the same teacher"),
        (
            "precision",
            "rank 2 has --precision 1, rank 0 has 0: all ranks need the same --precision",
        ),
    ]:

        def differing(run, name=name):
            run.model.arena.weights[0] = WORLD.rank // 2
            return options_of(run) | {name: WORLD.rank // 2}

        Run.resume_options = differing
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main([f"--{k}={v}" for k, v in {**GOOD, "out": folder / name}.items()])
        Run.resume_options = options_of
        text = said.getvalue()
        assert code == 2 and (WORLD.rank > 0 or sentence in text), text


def the_last_checkpoint_cannot_be_written(folder):
    """A full disk at the end: every rank exits with 2 and one rank prints it. Another disk error: the same in the next step."""
    write = checkpoint.write
    for i, (code, at, sentence) in enumerate(
        [(errno.ENOSPC, 3, "no space left to write"), (errno.EIO, 1, "cannot be written")]
    ):

        def fails(folder, snapshot, code=code, at=at):
            if snapshot.state["step"] == at:
                raise cannot_write(folder, OSError(code, os.strerror(code)))
            return write(folder, snapshot)

        checkpoint.write = fails
        given = {**GOOD, "out": folder / f"full{i}", "save-every": 1, "steps": 3, "zero": 3 * i}
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main([f"--{k}={v}" for k, v in given.items()])
        assert code == 2
        text = said.getvalue()
        assert (sentence in text and text.count("\n") == 1) if WORLD.rank == 0 else not text, text
        names = sorted(p.name for p in (folder / f"full{i}" / "run" / "checkpoints").glob("*"))
        # step 1 was removed to make room for step 3
        assert names == (["step-000002"] if i == 0 else []), names
    checkpoint.write = write


CHECKS = [
    everything_is_said_once,
    what_is_not_the_same_everywhere,
    what_is_known_with_the_model,
    the_last_checkpoint_cannot_be_written,
]
