"""Checkpoints: complete or absent, verified before use, written in the background; the newest and the best are kept."""

import errno
import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checks import rng
from faults import Fault, SmallDisk, error
from rich.console import Console
from runs import assert_same_run, checkpoints, metrics, options, run
from twins import GEMMA3

import xtrain
from xtrain import files
from xtrain.device import HostCopies
from xtrain.errors import UserError
from xtrain.formats import manifest, saved_runs, tensor_file
from xtrain.formats.manifest import verify
from xtrain.train import main
from xtrain.training import checkpoint, loop
from xtrain.training import checkpoint_writer as writer
from xtrain.training.run import Run
from xtrain.training.run_log import RunLog

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def stopped(cache, tmp_path_factory):
    """A run of 12 steps that was stopped after 8, with checkpoints 4 and 8; and the same run without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    whole = run(folder / "whole", steps=12, save_every=4)
    return run(folder / "stopped", steps=12, save_every=4, stop_at=8), whole


def a_copy(stopped, tmp_path):
    shutil.copytree(stopped[0].parent, tmp_path / "out")
    return tmp_path / "out" / "run"


FILES = (
    "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "tokenizer.json",
    "tokenizer_config.json", "manifest.json",
)  # fmt: skip


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "other": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_one_before_is_used(stopped, tmp_path, name, damage):
    folder, said = a_copy(stopped, tmp_path), []
    DAMAGE[damage](folder / "checkpoints/step-000008" / name)
    saved = saved_runs.newest(folder, said.append)
    assert saved.step == 4
    (sentence,) = said
    assert (
        name in sentence and "step-000008" in sentence and "going back to step-000004" in sentence
    )


def test_every_flipped_bit_is_found(stopped, tmp_path):
    """One bit flip at each of 61 positions in each file, including headers and the last bytes."""
    folder = a_copy(stopped, tmp_path) / "checkpoints/step-000008"
    rng = np.random.default_rng(0)
    for name in FILES:
        path = folder / name
        size, before = 8 * path.stat().st_size, path.read_bytes()
        first = np.arange(0, min(size, 100))
        some = rng.integers(0, size, 40)
        for bit in [*first[::5], *some, size - 1]:
            flip(path, int(bit))
            with pytest.raises(manifest.Damaged, match=name.replace(".", r"\.")):
                verify(folder)
            path.write_bytes(before)
        verify(folder)


@pytest.mark.parametrize(
    "name, tensor",
    [("model.safetensors", "model.norm.weight"), ("optimizer.safetensors", "v.model.norm.weight")],
)
def test_the_damaged_tensor_is_named(stopped, tmp_path, name, tensor):
    from xtrain.formats.tensor_file import read_header

    path = a_copy(stopped, tmp_path) / "checkpoints/step-000008" / name
    flip(path, 8 * (read_header(path)[tensor].start + 5) + 3)
    with pytest.raises(manifest.Damaged, match=f"{name} is damaged in {tensor}$"):
        verify(path.parent)
    flip(path, 8 * 20)
    with pytest.raises(manifest.Damaged, match=f"{name} is damaged"):
        verify(path.parent)


def test_a_flipped_bit_is_found_when_the_model_is_loaded(stopped, tmp_path):
    """Also without --resume. Other files may change, and a model saved over it does not count as damaged."""
    folder = a_copy(stopped, tmp_path) / "checkpoints/step-000008"
    (folder / "README.md").write_text("mine")
    flip(folder / "tokenizer_config.json", 8 * 5 + 1)
    model = xtrain.Transformer.from_pretrained(folder)
    flip(folder / "model.safetensors", 8 * 9000 + 1)
    with pytest.raises(
        UserError, match=r"model.safetensors is damaged in .*: use another checkpoint"
    ):
        xtrain.Transformer.from_pretrained(folder)
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        run(tmp_path, init=str(folder), name="other")
    before = model.arena.weights.tobytes()
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        model.load_weights(folder)
    assert model.arena.weights.tobytes() == before
    model.save_pretrained(folder)
    again = xtrain.Transformer.from_pretrained(folder)
    assert again.arena.weights.tobytes() == model.arena.weights.tobytes()
    (folder / "manifest.json").write_text('{"somebody": "else"}')
    xtrain.Transformer.from_pretrained(folder)
    (folder / "manifest.json").write_text("no JSON")
    xtrain.Transformer.from_pretrained(folder)


def test_moments_of_another_model_leave_this_one_alone(tmp_path):
    models = [xtrain.Transformer(SMALL, seed) for seed in (0, 1)]
    optimizers = [xtrain.AdamW(model, 1e-3) for model in models]
    state = dict(step=3, loader={}, options={}, made_on={}, row=0)
    folder = checkpoint.write(tmp_path, snapshot(models[0], optimizers[0], state))
    saved = saved_runs.newest(tmp_path)
    stored = tensor_file.read_header(folder / "optimizer.safetensors")
    tensors = {name: xtrain.Tensor(x.read()) for name, x in stored.items()}
    moment = tensors.pop("v.model.norm.weight")
    for names in ({}, {"v.model.norm.weights": moment}):
        tensor_file.write_safetensors(folder / "optimizer.safetensors", tensors | names)
        before = models[1].arena.weights.copy()
        with pytest.raises(UserError, match=r"not belong to this model \(v\.model\.norm\.weight\)"):
            checkpoint.load(saved, models[1], optimizers[1])
        assert np.array_equal(models[1].arena.weights, before)
        assert optimizers[1].t == 0
    tensors["v.model.norm.weight"] = moment
    tensor_file.write_safetensors(folder / "optimizer.safetensors", tensors)
    checkpoint.load(saved, models[1], optimizers[1])
    assert np.array_equal(models[1].arena.weights, models[0].arena.weights)


def test_norms_whose_file_holds_a_rounded_difference_return_bit_for_bit(tmp_path):
    """Gemma's file has w - 1, which float32 rounds if w is below 1/2."""
    config = xtrain.ModelConfig(
        vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=8, **GEMMA3
    )
    models = [xtrain.Transformer(config, seed) for seed in (0, 1)]
    optimizers = [xtrain.AdamW(model, 1e-3) for model in models]
    weights = models[0].arena.weights
    for name, norm in models[0].named_parameters():
        if name.endswith("norm.weight"):
            norm.data = rng(1).random(norm.shape, np.float32) / 10
    for optimizer in optimizers:
        optimizer.ema = np.zeros_like(weights)
    optimizers[0].ema[:] = weights * np.float32(0.9)
    state = dict(step=3, loader={}, options={}, made_on={}, row=0)
    folder = checkpoint.write(tmp_path, snapshot(models[0], optimizers[0], state))
    saved = saved_runs.newest(tmp_path)
    checkpoint.load(saved, models[1], optimizers[1])
    assert np.array_equal(models[1].arena.weights, weights)
    assert np.array_equal(optimizers[1].ema, optimizers[0].ema)
    stored = tensor_file.read_header(folder / "model.safetensors")["model.norm.weight"].read()
    assert np.array_equal(stored, models[0].model.norm.weight.data - 1)
    assert not np.array_equal(stored + 1, models[0].model.norm.weight.data)
    assert np.array_equal(
        xtrain.Transformer.from_pretrained(folder).model.norm.weight.data, stored + 1
    )


SMALL = xtrain.ModelConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=8)


def snapshot(model, optimizer, state):
    return checkpoint.snapshot(model, optimizer, state, None, HostCopies())


@pytest.mark.parametrize("kind", ["a link to nowhere", "a pipe"])
def test_what_somebody_has_put_beside_the_logs(tmp_path, monkeypatch, kind):
    synced = []
    monkeypatch.setattr(checkpoint, "sync", synced.append)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    mine = tmp_path / "notes.txt"
    mine.symlink_to("nowhere") if kind == "a link to nowhere" else os.mkfifo(mine)
    model = xtrain.Transformer(SMALL)
    state = dict(step=3, loader={}, options={}, made_on={}, row=0)
    checkpoint.write(tmp_path, snapshot(model, xtrain.AdamW(model, 1e-3), state))
    assert tmp_path / "metrics.jsonl" in synced and mine not in synced
    assert saved_runs.newest(tmp_path).step == 3


def test_files_from_elsewhere_are_named(stopped, tmp_path):
    folder = a_copy(stopped, tmp_path) / "checkpoints"
    (folder / "step-000008" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(manifest.Damaged, match=r"index.json does not belong there"):
        verify(folder / "step-000008")
    (folder / "step-000008" / "model.safetensors.index.json").unlink()
    (folder / "step-000008" / ".nfs0001").write_text("what a network disk leaves")
    verify(folder / "step-000008")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):  # same length, or not
        shutil.copytree(folder / "step-000008", tmp_path / "mixed")
        shutil.copy(folder / "step-000004" / name, tmp_path / "mixed" / name)
        with pytest.raises(manifest.Damaged, match=name):
            verify(tmp_path / "mixed")
        shutil.rmtree(tmp_path / "mixed")


def test_a_checkpoint_under_another_name(stopped, tmp_path):
    folder, said = a_copy(stopped, tmp_path), []
    shutil.copytree(folder / "checkpoints/step-000008", folder / "checkpoints/step-000010")
    (folder / "checkpoints" / "step-notes").mkdir()
    assert saved_runs.newest(folder, said.append).step == 8
    assert "holds the checkpoint of step 8" in said[0]


def test_from_a_damaged_checkpoint_the_run_ends_the_same(stopped, tmp_path):
    """The run goes back with a warning, repeats the steps and leaves no trace of the damaged checkpoint."""
    folder, console = a_copy(stopped, tmp_path), Console(record=True, width=1000)
    flip(folder / "checkpoints/step-000008/model.safetensors", 800_001)
    run(folder.parent, console, steps=12, save_every=4, resume=True)
    text = console.export_text()
    assert "model.safetensors is damaged" in text and "going back to step-000004" in text
    assert "resumed from" in text and "step-000004\n" in text
    assert checkpoints(folder) == ["step-000004", "step-000008", "step-000012"]
    assert_same_run(folder, stopped[1])


def test_damaged_ones_that_are_not_reached_again_are_removed(stopped, tmp_path):
    folder = a_copy(stopped, tmp_path)
    flip(folder / "checkpoints/step-000008/state.json", 99)
    run(folder.parent, steps=12, save_every=4, resume=True, stop_at=6)
    assert checkpoints(folder) == ["step-000004", "step-000006"]


def test_no_good_checkpoint(stopped, tmp_path, capsys):
    folder = a_copy(stopped, tmp_path)
    (folder / "checkpoints/step-000008/state.json").unlink()
    (folder / "checkpoints/step-000004/manifest.json").unlink()
    with pytest.raises(
        UserError,
        match=r"no checkpoint of .* can be used: .*state.json is missing.*manifest.json is mi",
    ):
        saved_runs.newest(folder)
    assert main(["--out", str(folder.parent), "--name", "run", "--resume"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ----------------------------------------------------------------------------- state.json with its checksums renewed
VALUES = (None, True, -1, 1.5, float("nan"), 10**30, "x", [], [3], {}, {"step": []})


def edited(folder, change):
    """Change the state.json of a checkpoint, and renew the checksums."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    (folder / "manifest.json").unlink()
    manifest.write_manifest(folder, tensors)


def test_any_value_in_the_state_works_or_is_a_user_error(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    one = a_run(tmp_path)
    saved = one.save(folder)
    state = json.loads((saved / "state.json").read_text())
    text, outcomes = (saved / "state.json").read_text(), {True: 0, False: 0}
    paths = [(name,) for name in state]
    paths += [(a, b) for a in ("loader", "logs", "made_on", "options") for b in state[a]]
    for i, path in enumerate(paths):
        values = (*VALUES, KeyError)
        if path[0] == "options":
            values = values[i % 3 :: 3]
        for value in values:

            def change(state, path=path, value=value):
                for name in path[:-1]:
                    state = state[name]
                state[path[-1]] = value
                if value is KeyError:
                    del state[path[-1]]

            (saved / "state.json").write_text(text)
            edited(saved, change)
            try:
                found = saved_runs.newest(folder)
                one.resume(found)
                saved_runs.best(saved_runs.folders(folder))
                RunLog(folder, one.config, found.state, Console(quiet=True))
                one.next_batch()
                outcomes[True] += 1
            except UserError as error:
                assert str(error) and "\n" not in str(error), (path, value)
                outcomes[False] += 1
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.parametrize("name, value", [("dim", "x"), ("dim", KeyError), ("n_heads", [3]), ("rope_theta", None)])  # fmt: skip
def test_the_shape_in_the_state_of_a_run_that_began_with_weights(stopped, tmp_path, name, value):
    kind = dict(init=str(stopped[0] / "checkpoints/step-000008"), vocab_size=None, steps=2)
    folder = run(tmp_path, **kind, stop_at=1)

    def change(state):
        state["options"][name] = value
        if value is KeyError:
            del state["options"][name]

    edited(folder / "checkpoints/step-000001", change)
    with pytest.raises(UserError, match=name):
        run(tmp_path, **kind, resume=True)
    config = json.loads((folder / "config.json").read_text())
    config["train"] |= {"init": 3, "tokenizer": [3]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=name):
        run(tmp_path, **kind, resume=True)
    with pytest.raises(UserError):
        run(tmp_path, **kind | dict(init=None), resume=True)


def test_the_best_has_a_finite_loss(tmp_path):
    one = a_run(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for done, loss in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 4.0)):
        one.done, one.val_loss = done, (done, loss)
        one.save(folder)
    for step in (1, 3):
        edited(folder / f"checkpoints/step-00000{step}", lambda state: state.update(val_loss=float("nan")))  # fmt: skip
    checkpoint.prune(folder, 4, 1)
    assert checkpoints(folder) == ["step-000002", "step-000004"]


# ----------------------------------------------------------------------------- which stay
def test_keep_newest_and_best(tmp_path, monkeypatch):
    losses = iter([5.0, 1.0, 3.0, 2.0, float("nan"), 2.5])
    monkeypatch.setattr(Run, "validate", lambda self: _validated(self, next(losses)))
    folder = run(tmp_path, steps=12, save_every=2, eval_every=2, keep=2)
    assert checkpoints(folder) == ["step-000004", "step-000010", "step-000012"]
    assert metrics(folder)[-4]["val_loss"] is None, "JSON has no NaN"


def _validated(run, loss):
    run.val_loss = run.done, loss
    return loss, loss


@pytest.mark.parametrize("keep, left", [(0, 4), (1, 1), (3, 3), (100, 4)])
def test_keep(tmp_path, keep, left):
    folder = run(tmp_path, steps=8, save_every=2, eval_every=8, keep=keep)
    assert checkpoints(folder) == [f"step-{s:06d}" for s in range(2, 9, 2)][-left:]


def test_only_a_validation_of_the_same_weights_counts(tmp_path):
    folder = run(tmp_path, steps=8, save_every=4, eval_every=3)
    states = [json.loads(p.read_text()) for p in sorted(folder.glob("checkpoints/*/state.json"))]
    assert states[0]["val_loss"] is None
    assert states[1]["val_loss"] == [m["val_loss"] for m in metrics(folder) if "val_loss" in m][-1]


def test_strays_of_killed_processes_go(tmp_path):
    folder = run(tmp_path, steps=4, stop_at=2)
    for stray in (".step-000002.tmp", ".step-000003.tmp", ".step-000001.old.tmp"):
        (folder / "checkpoints" / stray).mkdir()
        (folder / "checkpoints" / stray / "x").write_text("x")
    (folder / "config.json.tmp").write_text("{")
    run(tmp_path, steps=4, resume=True)
    assert checkpoints(folder) == ["step-000002", "step-000004"]
    assert not list(folder.rglob("*.tmp"))


def test_a_finished_run_that_was_killed_before_it_had_tidied_up(tmp_path):
    folder = run(tmp_path, steps=6, save_every=2, keep=0)
    (folder / "checkpoints" / ".step-000002.old.tmp").mkdir()
    run(tmp_path, steps=6, save_every=2, keep=1, resume=True)
    assert checkpoints(folder) == ["step-000006"]


def test_killed_before_the_first_checkpoint(tmp_path):
    """--resume then starts from the beginning and empties the logs."""
    whole, folder = run(tmp_path / "a", steps=6), run(tmp_path / "b", steps=6, stop_at=3)
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    console = Console(record=True, width=1000)
    run(tmp_path / "b", console, steps=6, resume=True)
    assert "holds no checkpoint yet: the run starts from its beginning" in console.export_text()
    assert_same_run(whole, folder)
    with pytest.raises(UserError, match="holds no checkpoint to resume from"):
        run(tmp_path / "c", resume=True)


# ----------------------------------------------------------------------------- how they are written
def test_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file, the folder itself and the logs are synced before the rename; the folders above after it."""
    events, fsync, rename = [], os.fsync, Path.rename

    def noting_fsync(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noting_rename(self, target):
        events.append(("rename", self))
        files_then = {p for p in self.iterdir()}
        assert files_then | {self} <= {path for what, path in events if what == "sync"}
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    folder = run(tmp_path, steps=2)
    at = next(i for i, (what, _) in enumerate(events) if what == "rename")
    before, after = events[:at], events[at + 1 :]
    for log in ("metrics.jsonl", "samples.txt"):
        assert ("sync", folder / log) in before
    assert ("sync", folder / "checkpoints") in after and ("sync", folder) in after


def a_run(folder):
    """A Run without a training loop around it, after one step."""
    from xtrain.data.dataset import prepare
    from xtrain.training.single_process import SINGLE_PROCESS
    from xtrain.training.start import decide, make_model

    start = decide(options(folder), SINGLE_PROCESS, True, print)
    corpus = prepare(start.config.data, start.config.vocab_size)
    made = Run(start.config, make_model(start, corpus, 1), corpus)
    made.step()
    return made


def good(folder):
    """-> the steps of the checkpoints, which are all undamaged"""
    for saved in saved_runs.folders(folder):
        verify(saved)
    return [int(saved.name[5:]) for saved in saved_runs.folders(folder)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_wherever_writing_fails_the_one_before_stays(tmp_path, monkeypatch, code):
    """A fault at every call of the writer that changes or opens something."""
    one = a_run(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    one.save(folder)
    one.step()
    n, said, failures, fault = 0, [], 0, None
    while fault is None or fault.count >= n:
        n += 1
        with monkeypatch.context() as patch:
            fault = Fault(patch, folder, n, error(code), thread=True)
            with writer.CheckpointWriter(folder, 3, said.append) as w:
                w.save(lambda: one.snapshot({}))
                w.wait()
                failed = w.failed
                failures += failed
                if code == errno.EIO and failed:
                    with pytest.raises(UserError, match="cannot be written"):
                        w.check()
                w.check()  # warns, does not raise
        assert good(folder) in ([[1], [1, 2]] if failed else [[1, 2]]), n
        if failed and code == errno.ENOSPC:
            assert "no space left" in said[-1] and "the last checkpoint is" in said[-1]
        shutil.rmtree(folder / "checkpoints" / "step-000002", ignore_errors=True)
    assert failures > 30 and n > failures
    one.save(folder)
    assert checkpoints(folder) == ["step-000001", "step-000002"], "what was left is removed"


def four_checkpoints(monkeypatch, one, folder, room, keep=3):
    """Save one run after each of four steps on a small disk. -> the disk, the sentence at the end, what was said."""
    said, end = [], ""
    first, position = one.done, one.loader.position
    with monkeypatch.context() as patch:
        disk = SmallDisk(patch, folder, room)
        with writer.CheckpointWriter(folder, keep, said.append) as w:
            for i in range(4):
                one.done, one.val_loss = i + 1, (i + 1, float(i))  # the first is the best
                before = good(folder)
                w.save(lambda: one.snapshot({}))
                w.wait()
                now = good(folder)
                assert now and max(now) >= max(before) if before else True, "the newest is lost"
                if i < 3:
                    w.check()
            try:
                w.finish()
            except files.DiskFull as full:
                end = str(full)
    one.done, one.loader.position = first, position
    return disk, end, said


def test_a_disk_with_room_for_a_few_checkpoints(tmp_path, monkeypatch):
    """It becomes full at each write, with k whole checkpoints on it: from two on, the last weights are saved."""
    one = a_run(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    disk, end, said = four_checkpoints(monkeypatch, one, whole, 10**9)
    writes = len(disk.marks) // 4
    assert good(whole) == [1, 2, 3, 4] and end == "" and said == [] and writes == 7
    last = {p.name: p.read_bytes() for p in (whole / "checkpoints/step-000004").iterdir()}
    for n, mark in enumerate(disk.marks):
        k, folder = n // writes, tmp_path / f"full-{n}"
        folder.mkdir()
        _, end, said = four_checkpoints(monkeypatch, one, folder, mark - 1)
        if k < 2:
            assert good(folder) == [1][:k] and "no space left" in end
            assert (f"the last checkpoint is {folder}/checkpoints/step-000001" if k else "there is no checkpoint yet") in end  # fmt: skip
            continue
        assert end == "" and good(folder)[0] == (1 if k > 2 else 3), "the best goes last"
        ours = {p.name: p.read_bytes() for p in (folder / "checkpoints/step-000004").iterdir()}
        assert ours == last and len(good(folder)) == k
        assert "no space left for a checkpoint of step" in said[0] and "is removed" in said[0]
        assert all(name.startswith("step-") for name in checkpoints(folder))
        shutil.rmtree(folder)


def test_logs_that_do_not_fit(tmp_path):
    """Room is made for them, too: without them a checkpoint is not written."""
    one = a_run(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for done in (1, 2, 3):
        one.done = done
        one.save(folder)
    one.done, said = 4, []
    with writer.CheckpointWriter(folder, 3, said.append) as w:
        w.save(lambda: one.snapshot({}), lambda: len(good(folder)) < 3)
        w.finish()
        assert good(folder) == [2, 3, 4] and len(said) == 1
        one.done = 5
        w.save(lambda: one.snapshot({}), lambda: False)
        with pytest.raises(files.DiskFull, match="no space left for a checkpoint of step 5; the l"):
            w.finish()
    assert good(folder) == [4]


def test_what_is_removed_on_a_full_disk(tmp_path, monkeypatch):
    one = a_run(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for done in range(1, 8):
        one.done, one.val_loss = done, (done, abs(done - 3.0))
        one.save(folder)
    (folder / "checkpoints/step-000002/eval.json").write_text("{}")
    flip(folder / "checkpoints/step-000006/model.safetensors", 80_001)
    flip(folder / "checkpoints/step-000007/state.json", 81)
    order = []
    while name := checkpoint.make_room(folder, 8, 1):
        order.append(int(name[5:]))
    assert order == [7, 6, 1, 4, 3], "the damaged, the old, the best"
    assert [p.name for p in saved_runs.folders(folder)] == ["step-000002", "step-000005"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        one.done = 6
        one.save(folder)
        (folder / "checkpoints/step-000002/eval.json").unlink()
        assert checkpoint.make_room(folder, 7, 10**9) is None, "it would not fit anyway"
        size = one.snapshot({}).nbytes
        assert checkpoint.make_room(folder, 7, size) == "step-000005"
    assert checkpoint.make_room(folder, 6, 1) is None, "the only one before it"


def test_too_little_room_is_said_at_the_start(tmp_path, monkeypatch):
    usage = shutil.disk_usage
    said = Console(record=True, width=1000)
    folder = run(tmp_path, said, steps=8, save_every=2, stop_at=2, keep=1)
    assert "room for" not in said.export_text()
    size = sum(p.stat().st_size for p in (folder / "checkpoints/step-000002").glob("*.safetensors"))
    for free, keep, words in (
        (1.1, 1, r"room for 2 of the 3 checkpoints of 0\.001\d* GB that this run needs \(--keep 1, the best"),
        (2.2, 1, ""), (2.2, 3, r"room for 3 of the 4 .* needs \(--keep 3, "), (2.2, 0, r"the 4 .* needs \(--keep 0\): make room"), (3.3, 0, ""),
    ):  # fmt: skip
        about = SimpleNamespace(free=int(free * size))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, about=about: about)
        said = Console(record=True, width=1000)
        run(tmp_path, said, steps=8, save_every=2, stop_at=2, keep=keep, resume=True)
        text = said.export_text()
        assert bool(words) == ("has room for" in text) and re.search(words, text), (free, keep)
    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_too_little_memory_for_a_checkpoint_is_said_at_the_start(tmp_path, monkeypatch):
    """The copies of rank 0 are made at the first checkpoint, maybe hours after the start."""
    folder = run(tmp_path, steps=4, stop_at=2)
    size = (folder / "checkpoints/step-000002/optimizer.safetensors").stat().st_size * 3 // 2
    for free, said_once in ((size * 0.9, True), (size * 1.1, False), (None, False)):
        monkeypatch.setattr(loop, "free_memory", lambda free=free: free)
        said = Console(record=True, width=1000)
        run(tmp_path, said, steps=4, stop_at=2, resume=True)
        assert ("copied to the memory of this machine" in said.export_text()) == said_once, free


def failing_write(monkeypatch, steps, code):
    write = checkpoint.write

    def fails(folder, snapshot):
        if snapshot.state["step"] in steps:
            raise files.cannot_write(folder, OSError(code, os.strerror(code)))
        return write(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", fails)


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    failing_write(monkeypatch, (4,), errno.ENOSPC)
    console = Console(record=True, width=1000)
    folder = run(tmp_path, console, steps=6, save_every=2)
    assert checkpoints(folder) == ["step-000002", "step-000006"]
    text = console.export_text()
    assert text.count("no space left") == 1 and "training continues, the last checkpoint is" in text


def test_a_full_disk_at_the_end_is_an_error(tmp_path, monkeypatch):
    failing_write(monkeypatch, (6,), errno.EDQUOT)
    with pytest.raises(
        UserError, match=r"no space left to write .*the last checkpoint is .*step-000004"
    ):
        run(tmp_path, steps=6, save_every=2)


def test_another_error_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    """The run ends with the step after the writer's failure."""
    failing_write(monkeypatch, (2,), errno.EIO)
    step = Run.step

    def patient(self):
        for thread in threading.enumerate():  # so that this step is sure to come after the failure
            if thread is not threading.main_thread() and "_write" in str(thread):
                thread.join()
        return step(self)

    monkeypatch.setattr(Run, "step", patient)
    with pytest.raises(UserError, match="cannot be written"):
        run(tmp_path, steps=9, save_every=2, eval_every=100)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_training_goes_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    """The writer is delayed until step 4; it then writes the state of step 2."""
    release, write, step, held = threading.Event(), checkpoint.write, Run.step, []
    whole = run(tmp_path / "a", steps=6, save_every=2, keep=0)

    def slow(folder, snapshot):
        if snapshot.state["step"] == 2:
            held.append(release.wait(60))
        return write(folder, snapshot)

    def steps_on(self):
        if self.done == 3:  # steps 3 and 4 are done while step 2 is not on the disk
            assert not (tmp_path / "b/run/checkpoints/step-000002").exists()
            release.set()
        return step(self)

    monkeypatch.setattr(checkpoint, "write", slow)
    monkeypatch.setattr(Run, "step", steps_on)
    late = run(tmp_path / "b", steps=6, save_every=2, keep=0)
    assert held == [True] and checkpoints(late) == checkpoints(whole)
    assert_same_run(late, whole)


def test_nobody_else_may_write_the_run(tmp_path):
    folder = run(tmp_path, steps=2, stop_at=1)
    with files.locked(folder), pytest.raises(UserError, match="being written by another process"):
        run(tmp_path, steps=2, resume=True)
    run(tmp_path, steps=2, resume=True)
