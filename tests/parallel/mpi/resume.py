"""Checkpoints do not depend on the number of ranks: save with 4, resume with 2, then 1. All ranks skip the same steps.

mpirun -n 4 python together.py FOLDER resume
"""

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
import types

import numpy as np
from common import TEXT, WORLD, divided, options, some_ranks, wait
from rich.console import Console

from xtrain.config import ModelConfig
from xtrain.data.dataset import prepare
from xtrain.errors import UserError
from xtrain.formats import saved_runs
from xtrain.nn import functional as F
from xtrain.nn.model import Transformer
from xtrain.nn.sharded_arena import Share
from xtrain.parallel.watchdog import Watchdog
from xtrain.reinforcement.reinforce import ReinforceConfig, reinforce
from xtrain.report import page as report
from xtrain.train import train
from xtrain.training import checkpoint, loop
from xtrain.training.run import Run
from xtrain.tuning.finetune import FinetuneConfig, finetune
from xtrain.tuning.prefer import PreferConfig, prefer

SILENT = Console(quiet=True)
NO_REPORT = dict(write_report=lambda *about: None)
STEPS = 6
FILES = ("model.safetensors", "optimizer.safetensors")
EMA_FILES = ("ema/model.safetensors", "ema/manifest.json")
MUON = dict(optimizer="muon", ema=0.9, schedule="wsd")


def numbers(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_lines(path, lines):
    """Write records as JSON lines, on rank 0; all wait for it."""
    if WORLD.rank == 0:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wait()


def losses(run):
    return [line["loss"] for line in numbers(run) if "loss" in line]


def train_on(n, config, work=loop.train):
    """Return the run's folder; only on the first n processes."""
    ranks = some_ranks(n)
    run = None if ranks is None else work(config, SILENT, divided(ranks), **NO_REPORT)
    wait()
    return run


def elastic(folder):
    for name, kind in (("", {}), (" muon", MUON)):
        if WORLD.rank == 0:
            whole = losses(train(options(folder / f"alone{name}", steps=STEPS, **kind), SILENT))
        for zero in (1,) if kind else (0, 1):
            at = dict(out=folder / f"elastic{zero}{name}", steps=STEPS, **kind)
            train_on(4, options(**at, zero=zero, stop_at=3))
            loaded_state(at["out"] / "run", kind)
            train_on(2, options(**at, zero=1 - zero, stop_at=5, resume=True))
            run = train_on(1, options(**at, resume=True))
            if WORLD.rank == 0:
                np.testing.assert_allclose(losses(run), whole, rtol=1e-6)


def loaded_state(run, kind, worlds=((2, (1,)), (3, (0, 1)), (4, (1,)))):
    """2, 3 or 4 ranks that load it and save it again write the same bytes. worlds: ranks, --zero."""
    files = FILES + EMA_FILES if kind else FILES
    saved = saved_runs.newest(run)
    for n, shardings in worlds:
        ranks = some_ranks(n)
        if ranks is not None:
            for sharded in shardings:
                config = options(
                    run.parent,
                    name=f"again{n}{sharded}",
                    zero=sharded,
                    batch=12,
                    micro_batch=1,
                    **kind,
                )
                corpus = prepare(TEXT, config.vocab_size)
                shape = checkpoint.huggingface.read_config(saved.folder).to_dict()
                share = Share(ranks.rank, n) if sharded == 3 else None
                model = Transformer(ModelConfig(**shape), 9, "cpu", world=n, share=share)
                again = Run(config, model, corpus, divided(ranks))
                again.parallel.load(saved, again.optimizer)
                again.save(run.parent / config.name)
                if ranks.rank == 0:
                    copy = run.parent / config.name / "checkpoints" / "step-000000"
                    for name in files:
                        assert (copy / name).read_bytes() == (saved.folder / name).read_bytes(), (
                            n,
                            name,
                        )
        wait()


def the_same_world_is_byte_exact(folder):
    for i, kind in enumerate((dict(zero=0), dict(zero=1), dict(zero=1, **MUON))):
        whole = train_on(4, options(folder / f"whole{i}", steps=STEPS, eval_every=3, **kind))
        parts = dict(out=folder / f"parts{i}", steps=STEPS, eval_every=3, **kind)
        train_on(4, options(**parts, stop_at=4))  # where nothing else is due
        halves = train_on(4, options(**parts, resume=True))
        if WORLD.rank == 0:
            files = FILES + EMA_FILES if "ema" in kind else FILES
            names = [f"checkpoints/step-{STEPS:06d}/{name}" for name in (*files, "state.json")]
            for name in ("metrics.jsonl", "samples.txt", *names):
                assert (whole / name).read_bytes() == (halves / name).read_bytes(), name


@contextlib.contextmanager
def wrong_on_rank(rank, op, steps, value):
    """On one rank, the first number of an op's result is replaced in these steps."""
    step, forward = Run.step, op.forward
    now = []

    def noting_step(run):
        now[:] = [run.done + 1]
        return step(run)

    def wrong(ctx, *args):
        result = forward(ctx, *args)
        if WORLD.rank == rank and now and now[0] in steps:
            result.reshape(-1)[0] = value
        return result

    Run.step, op.forward = noting_step, staticmethod(wrong)
    yield
    Run.step, op.forward = step, staticmethod(forward)


def a_bad_step_is_skipped_by_all(folder):
    """NaN in an activation of one rank; or an infinite loss on one rank while all gradients are finite."""
    loss_alone = F.LinearCrossEntropy
    kinds = [
        (dict(zero=0), F.Embedding), (dict(zero=0), loss_alone), (dict(zero=1), loss_alone),
        (dict(dp="naive"), F.Embedding), (dict(dp="none"), loss_alone),
    ]  # fmt: skip
    for i, (kind, op) in enumerate(kinds):
        alone = kind.get("dp") == "none"
        with wrong_on_rank(1, op, (3,), np.nan if op is F.Embedding else np.inf):
            at = options(folder / f"skip{i}", steps=5, check_ranks=0 if alone else 1, **kind)
            run = train_on(2, at)
        if WORLD.rank == 0:
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert [line["step"] for line in lines if "skipped" in line] == [3], (kind, op, lines)


def the_rank_is_named(folder):
    for i, kind in enumerate((dict(zero=1), dict(dp="none"))):
        at = options(folder / f"named{i}", steps=9, max_skips=2, **kind)
        with wrong_on_rank(1, F.Attention, (4, 5, 6), np.inf):
            try:
                ranks = some_ranks(2)
                assert ranks is None or loop.train(at, SILENT, divided(ranks), **NO_REPORT) is None
            except UserError as error:
                assert "the last at step 5" in str(error), error
                assert "rank 1: layer 0, Attention, forward (0 NaN and 1 infinite" in str(error), (
                    error
                )
        wait()


def one_rank_has_nothing_to_send(folder):
    """--grad-comm only concerns several ranks: a single rank in between does not count as a change."""
    at = dict(out=folder / "alone between", steps=3, grad_comm="bf16")
    for i, n in enumerate((2, 1, 2)):
        run = train_on(n, options(**at, stop_at=i + 1, resume=i > 0))
    if WORLD.rank == 0:
        assert len(losses(run)) == 3


def all_ranks_wait_for_the_report(folder):
    """A signal to the job would end a rank that had left, and with it the job. The watchdog is off by then."""
    watched = []

    def slowly(*about):
        watched.extend(t for t in threading.enumerate() if isinstance(t, Watchdog) and t.is_alive())
        time.sleep(0.3)
        report.finish(*about)

    ranks = some_ranks(2)
    if ranks is not None:
        config = options(folder / "report", steps=1)
        run = loop.train(config, SILENT, divided(ranks), write_report=slowly)
        assert (run / "report.html").exists() and not watched, watched
    wait()


def one_rank_is_asked_to_stop(folder):
    """All ranks stop, and rank 0 writes no report: there may be no time for it."""
    step = Run.step

    def asked(run):
        if WORLD.rank == 1 and run.done == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(run)

    Run.step, said = asked, io.StringIO()
    ranks = some_ranks(2)
    if ranks is not None:
        config, console = (
            options(folder / "asked", steps=9),
            Console(file=said, quiet=ranks.rank > 0),
        )
        run = loop.train(config, console, divided(ranks), write_report=report.finish)
        assert saved_runs.newest(run).step == 2 and not (run / "report.html").exists()
        assert ranks.rank or "stopped after step 2 (requested on another rank)" in said.getvalue()
    Run.step = step
    wait()


def fine_tuning(folder):
    """Packed rows on two ranks, stopped and continued on one: the losses of one rank alone."""
    data = folder / "chats.jsonl"
    words = TEXT.read_text().split()
    answers = [" ".join(words[i : i + i % 9 + 1]) for i in range(60)]
    write_lines(data, [{"prompt": f"{a} ", "completion": b} for a, b in zip(words, answers)])

    def tuned(name, n, **more):
        shape = dict(steps=6, eval_every=3, save_every=3, sample_tokens=2, lr=1e-3, device="cpu")
        config = FinetuneConfig(
            init=str(folder / "alone" / "run"), data=(str(data),), out=str(folder), name=name,
            pack=True, batch=4, seq_len=16, **shape, **more,
        )  # fmt: skip
        return train_on(n, config, finetune)

    alone = tuned("tuned", 1)
    tuned("divided", 2, stop_at=3, zero=1)
    resumed = tuned("divided", 1, resume=True)
    if WORLD.rank == 0:
        np.testing.assert_allclose(losses(resumed), losses(alone), rtol=1e-5)


def preferences(folder):
    """Rows of kto on two ranks, whose KL is of both, stopped and continued on one: the numbers of one rank alone."""
    data = folder / "labels.jsonl"
    words = TEXT.read_text().split()
    answers = [" ".join(words[i : i + i % 5 + 1]) for i in range(20)]
    rows = enumerate(zip(words, answers))
    write_lines(
        data, [{"prompt": f"{a} ", "completion": b, "label": i % 3 > 0} for i, (a, b) in rows]
    )

    def preferred(name, n, **more):
        shape = dict(steps=4, eval_every=2, save_every=2, sample_tokens=2, lr=1e-3, device="cpu")
        config = PreferConfig(
            init=str(folder / "alone" / "run"), data=(str(data),), out=str(folder), name=name,
            loss="kto", batch=4, val_share=0.15, **shape, **more,
        )  # fmt: skip
        return train_on(n, config, prefer)

    alone = preferred("preferred", 1)
    preferred("in_two", 2, stop_at=2, zero=1)
    resumed = preferred("in_two", 1, resume=True)
    if WORLD.rank == 0:
        for a, b in zip(numbers(alone), numbers(resumed), strict=True):
            names = sorted(a.keys() & {"loss", "margin", "kl", "val_loss", "val_kl"})
            found, want = (np.array([line[name] for name in names], float) for line in (b, a))
            np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-5, err_msg=str(names))


def reinforcement(folder):
    """Two ranks draw the completions of one; log-probabilities are the same bits; ranks that stopped continue on one."""
    reward = lambda record, texts: [float(sum(map(ord, text)) % 7) for text in texts]
    reply = lambda record, messages: " and " if len(messages) < 4 else None
    sys.modules["a_task"] = types.SimpleNamespace(reward=reward, reply=reply)
    data = folder / "prompts.jsonl"
    write_lines(data, [{"prompt": f"{a} "} for a in sorted(set(TEXT.read_text().split()))[:12]])

    def reinforced(name, n, **more):
        shape = dict(steps=4, eval_every=2, save_every=2, group=2, batch=8, max_new_tokens=9)
        config = ReinforceConfig(
            init=str(folder / "alone" / "run"), data=(str(data),), out=str(folder), name=name,
            task="a_task:reward", environment="a_task:reply", stop_strings=("e", "a", "t"), lr=1e-5, device="cpu",
            **shape, **more,
        )  # fmt: skip
        return train_on(n, config, reinforce)

    alone = reinforced("rewarded", 1)
    reinforced("shared", 2, stop_at=2, zero=1)
    shared = reinforced("shared", 1, resume=True)
    if WORLD.rank == 0:
        for a, b in zip(numbers(alone), numbers(shared), strict=True):
            for name in (
                "reward",
                "completion_tokens",
                "turns",
                "val_reward",
                "ratio_error",
                "rollout_kl",
            ):
                assert a.get(name) == b.get(name), (name, a, b)
            assert not a.get("ratio_error") and not a.get("rollout_kl")
        np.testing.assert_allclose(losses(shared), losses(alone), rtol=1e-4, atol=1e-6)


CHECKS = [
    elastic,
    fine_tuning,
    preferences,
    reinforcement,
    one_rank_has_nothing_to_send,
    all_ranks_wait_for_the_report,
    one_rank_is_asked_to_stop,
    the_same_world_is_byte_exact,
    a_bad_step_is_skipped_by_all,
    the_rank_is_named,
]
