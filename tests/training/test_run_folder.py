"""The folder of a run after changes by others: folders, pipes and links in place of files, and strange names.

Either the run continues and ends normally, or it ends with one sentence; it never hangs.
"""

import errno
import json
import os
import shlex
import shutil
import signal
import time

import pytest
from rich.console import Console
from runs import DATA, assert_same_run, checkpoints, options, run

from xtrain.errors import UserError
from xtrain.files import DiskFull
from xtrain.formats import manifest, saved_runs
from xtrain.train import main, train
from xtrain.training import checkpoint
from xtrain.training import loop as train_module
from xtrain.training.checkpoint_writer import CheckpointWriter
from xtrain.training.run import Run

pytestmark = pytest.mark.usefixtures("cache")


KIND = dict(steps=9, save_every=3, eval_every=5)


@pytest.fixture(scope="module")
def stopped(cache, tmp_path_factory):
    """A run of 9 steps that was stopped after 6, with checkpoints 3 and 6; and the same run without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    return run(folder / "stopped", **KIND, stop_at=6), run(folder / "whole", **KIND)


@pytest.fixture
def folder(stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run"


def instead(path, kind):
    """Replace a file or folder by something else."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a file":
        path.write_text("x")
    else:
        path.symlink_to("/nowhere" if kind == "a broken link" else path)


# ----------------------------------------------------------------------------- manifests
def entry(content, **more):
    content["files"]["state.json"] |= more


MANIFESTS = {
    "files is a number": lambda c: c.update(files=3),
    "files is a list": lambda c: c.update(files=["state.json"]),
    "no files": lambda c: c.pop("files"),
    "tensors is a list": lambda c: c.update(tensors=[1]),
    "no tensors": lambda c: c.pop("tensors"),
    "a file is a number": lambda c: c["files"].update({"state.json": 3}),
    "a size is text": lambda c: entry(c, bytes="x"),
    "a size is true": lambda c: entry(c, bytes=True),
    "a checksum is a number": lambda c: entry(c, blake2b=3),
    "a file without a size": lambda c: c["files"]["state.json"].pop("bytes"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_the_wrong_types(folder, name):
    """Its own checksum is right, so it was made on purpose."""
    path, said = folder / "checkpoints/step-000006/manifest.json", []
    content = json.loads(path.read_text())
    content.pop("itself")
    MANIFESTS[name](content)
    path.write_bytes(manifest._dump({**content, "itself": manifest._hash_of(content)}))
    assert saved_runs.newest(folder, said.append).step == 3
    assert "manifest.json does not describe files and tensors: going back to step-000003" in said[0]


@pytest.mark.parametrize("content", [b"[]\n", b"3\n", b'"a"\n', b"[" * 100_000])
def test_a_manifest_that_is_no_object(folder, content):
    said = []
    (folder / "checkpoints/step-000006/manifest.json").write_bytes(content)
    assert saved_runs.newest(folder, said.append).step == 3
    assert "manifest.json is damaged" in said[0] and len(said[0]) < 1000


# ----------------------------------------------------------------------------- not a file
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a broken link"])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_no_file_in_a_checkpoint(folder, name, kind):
    said = []
    instead(folder / "checkpoints/step-000006" / name, kind)
    assert saved_runs.newest(folder, said.append).step == 3
    assert f"{name} is" in said[0] and "going back to step-000003" in said[0]


@pytest.mark.parametrize("kind", ["a file", "a pipe", "a broken link", "a link to itself"])
def test_no_folder_where_a_checkpoint_is_to_be(loss_picture, stopped, folder, kind):
    """The run goes back and overwrites it, and also what a killed process has left."""
    instead(folder / "checkpoints/step-000006", kind)
    instead(folder / "checkpoints/.step-000009.tmp", kind)
    instead(folder / "checkpoints/.step-000003.old.tmp", "a folder")
    (folder / "loss.png.old.tmp").mkdir()
    run(folder.parent, **KIND, resume=True)
    assert checkpoints(folder) == ["step-000003", "step-000006", "step-000009"]
    assert_same_run(folder, stopped[1])


LOGS = ["metrics.jsonl", "timing.jsonl", "layers.jsonl", "samples.txt", "rollouts.jsonl"]


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to itself"])
def test_a_log_that_is_no_file(folder, name, kind):
    instead(folder / name, kind)
    with pytest.raises(UserError, match=f"{name} is not a file: move it away"):
        run(folder.parent, **KIND, resume=True)
    assert checkpoints(folder) == ["step-000003", "step-000006"]


@pytest.mark.parametrize("name", ["loss.png", "report.html", "sentence.json"])
def test_what_a_run_does_not_need(loss_picture, stopped, folder, name):
    instead(folder / name, "a folder")
    console = Console(record=True, width=1000)
    run(folder.parent, console, **KIND, resume=True)
    assert f"{name} cannot be written (Is a directory)" in console.export_text()
    assert_same_run(folder, stopped[1])


LINES = [
    b"[" * 100_000, b'{"step": 2, "loss": ' + b"9" * 400 + b"}", b'{"step": 3, "loss": NaN}', b'{"step": true, "loss": "x"}',
    b'{"step": [1]}', b'{"step": -' + b"9" * 5000 + b"}", b'{"step": {}, "loss": [1]}', b"\xff", b"3",
]  # fmt: skip


def test_lines_of_any_kind(loss_picture, stopped, folder):
    """Lines that are not records are removed, the others stay; none disturbs the next steps or the picture."""
    path = folder / "metrics.jsonl"
    path.write_bytes(b"\n".join([*LINES, path.read_bytes()]))
    run(folder.parent, **KIND, resume=True)
    ours = (stopped[1] / "metrics.jsonl").read_bytes()
    assert path.read_bytes().endswith(ours) and b"[[[" not in path.read_bytes()
    assert (folder / "loss.png").stat().st_size > 5000


# ----------------------------------------------------------------------------- names
@pytest.mark.parametrize("name", ["[/]", "[bold]x", "a b\nc"])
def test_names_that_look_like_something_else(tmp_path, name, capsys):
    data = tmp_path / f"{name}.txt".replace("/", "-")
    data.write_text((DATA / "grammar.txt").read_text())
    name = name.replace("/", "-") if name != "[/]" else "[/red]"
    out = run(
        tmp_path / "[/b]",
        Console(width=1000),
        name=name,
        data=str(data),
        steps=2,
        sample_prompt="[/i]",
    )
    run(
        tmp_path / "[/b]",
        Console(width=1000),
        name=name,
        data=str(data),
        steps=2,
        sample_prompt="[/i]",
        resume=True,
    )
    said = capsys.readouterr().out
    assert f"resumed from {out}" in said and "[/i]" in said
    assert f"--model {shlex.quote(str(out))}" in said  # can be pasted into a shell


@pytest.mark.parametrize("more", [[], ["--resume"]])
@pytest.mark.parametrize("out", ["a" * 300, "b/" * 3000, "/proc/none", "/dev/null/x"])
def test_no_place_for_a_run(tmp_path, monkeypatch, capsys, out, more):
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(DATA / "grammar.txt"), "--vocab-size", "320"]
    assert main([*data, "--out", out, "--name", "run", "--seq-len", "32", *more]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert any(s in said for s in ("cannot be written", "cannot be read", "holds no checkpoint"))


# ----------------------------------------------------------------------------- while it trains
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("where", ["validate", "sample", "snapshot"])
def test_a_signal_in_the_middle_of(stopped, tmp_path, monkeypatch, where, number):
    """The work in progress and the step are finished, then a checkpoint is written; the resumed run is the same."""
    monkeypatch.setattr("xtrain.report.page.finish", lambda *_: None)
    work, sent = getattr(Run, where), []

    def with_signal(self, *given):
        if not sent:
            sent.append(self.done)
            os.kill(os.getpid(), number)
        return work(self, *given)

    kind = dict(KIND, sample_every=5) if where == "sample" else KIND
    with monkeypatch.context() as patch:
        patch.setattr(Run, where, with_signal)
        out = run(tmp_path, **kind)
    assert checkpoints(out)[-1] == f"step-{sent[0] + 1:06d}" and sent[0] in (3, 5)
    run(tmp_path, **kind, resume=True)
    if kind is KIND:
        assert_same_run(out, stopped[1])


@pytest.mark.parametrize("what", ["checkpoints", "."])
def test_the_folder_goes_while_it_trains(tmp_path, monkeypatch, what):
    step = Run.step

    def without(self):
        if self.done == 4:
            there = tmp_path / "run" / "checkpoints"
            while not there.exists():  # the first checkpoint is being written by a thread
                time.sleep(0.01)
            (tmp_path / "run" / what).resolve().rename(tmp_path / "gone")
        return step(self)

    monkeypatch.setattr(Run, "step", without)
    with pytest.raises(UserError, match="cannot be written"):
        run(tmp_path, **KIND)


def test_the_folder_goes_before_the_first_checkpoint(tmp_path, monkeypatch):
    """It is not created again, because the logs of the run are gone with it."""
    write = CheckpointWriter._write

    def late(self, *given):
        self.run.rename(tmp_path / "gone")
        write(self, *given)

    monkeypatch.setattr(CheckpointWriter, "_write", late)
    # a checkpoint or a line of a log finds it first
    with pytest.raises(UserError, match=r"run(/\w+\.jsonl)? cannot be written"):
        run(tmp_path, **KIND)
    assert not (tmp_path / "run").exists()


def test_the_folder_goes_before_a_checkpoint_is_whole(tmp_path, monkeypatch):
    """The manifest needs to read its files."""
    read = manifest.read_header

    def late(path):
        path.parent.parent.rename(tmp_path / "gone")
        return read(path)

    monkeypatch.setattr(manifest, "read_header", late)
    with pytest.raises(UserError, match=r"step-\d+ cannot be written"):
        run(tmp_path, **KIND)


def test_a_time_limit_shorter_than_anything(tmp_path):
    """Every start makes one step, so the run comes to an end."""
    for done in (1, 2):
        out = run(tmp_path, steps=2, time_limit="0.001", resume=done > 1)
        assert checkpoints(out)[-1] == f"step-{done:06d}"


def test_a_disk_that_is_full_before_anything_is_there(tmp_path, monkeypatch):
    """The folder of checkpoints could not be created. That does not count as removed: the next checkpoint creates it."""
    write, calls = checkpoint.write, []

    def full_at_first(folder, snapshot):
        calls.append(snapshot)
        if len(calls) == 1:
            raise DiskFull("no space left")
        return write(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", full_at_first)
    out = run(tmp_path, **KIND)
    assert checkpoints(out) == ["step-000006", "step-000009"]


# ----------------------------------------------------------------------------- other processes at the same time
def meanwhile(monkeypatch, *works):
    """Call works[0]() while the first text is being read, works[1]() while the second is, and so on."""
    read, left = train_module.prepare, list(works)

    def slow(*args, **options):
        corpus = read(*args, **options)
        if left:
            left.pop(0)()
        return corpus

    monkeypatch.setattr(train_module, "prepare", slow)


def test_a_run_that_was_made_while_the_text_was_read(tmp_path, monkeypatch):
    """The folder was free when this process chose it, and holds a finished run once the text is read."""
    other = lambda: run(tmp_path, **KIND | dict(name=None))  # a process with a shorter text
    meanwhile(monkeypatch, other, lambda: None)
    ours = run(tmp_path, **KIND | dict(name=None, seed=1))
    assert ours.name == "test-2" and len(checkpoints(tmp_path / "test")) == 3
    meanwhile(monkeypatch, lambda: run(tmp_path, **KIND), lambda: None)
    with pytest.raises(UserError, match="already exists: add --resume"):
        run(tmp_path, **KIND | dict(seed=1))
    assert_same_run(tmp_path / "run", tmp_path / "test")


def test_a_checkpoint_that_was_written_while_the_text_was_read(stopped, folder, monkeypatch):
    """The process that was asked to stop was still writing when the next one started."""
    shutil.move(folder / "checkpoints/step-000006", folder.parent)
    arrives = lambda: shutil.move(folder.parent / "step-000006", folder / "checkpoints")
    meanwhile(monkeypatch, arrives)
    said = Console(record=True, width=1000)
    run(folder.parent, said, **KIND, resume=True)
    assert f"resumed from {folder / 'checkpoints/step-000006'}" in said.export_text()
    assert_same_run(folder, stopped[1])


def test_a_checkpoint_that_went_while_the_model_was_made(stopped, folder):
    """The model that it should have filled must not be trained from scratch."""
    kind = KIND | dict(init=str(stopped[0] / "checkpoints/step-000006"), vocab_size=None)
    run(folder.parent, **kind | dict(name="new"), stop_at=3)

    def make_run(*given):
        shutil.move(folder.parent / "new/checkpoints/step-000003", folder.parent)
        return Run(*given)

    config = options(folder.parent, **kind | dict(name="new"), resume=True)
    with pytest.raises(UserError, match="step-000003 is gone: start again"):
        train(config, Console(quiet=True), make_run=make_run)


# ----------------------------------------------------------------------------- files that the user added
def test_a_file_beside_the_weights_is_no_damage(stopped, folder):
    """For example results of an evaluation. The run continues, and this checkpoint is not removed."""
    own = folder / "checkpoints/step-000003/eval.json"
    own.write_text('{"mmlu": 0.3}')
    (folder / "checkpoints/step-000006/.DS_Store").write_text("")
    said = []
    assert saved_runs.newest(folder, said.append).step == 6 and said == []
    run(folder.parent, **KIND, resume=True, keep=1)
    assert own.read_text() == '{"mmlu": 0.3}'
    assert checkpoints(folder) == ["step-000003", "step-000009"]
    own.unlink()
    assert_same_run(folder, stopped[1])


def test_a_checkpoint_that_cannot_be_read_now_is_not_thrown_away(folder, monkeypatch):
    """Missing permission or too many open files are temporary. A broken disk is not."""
    good, code = manifest.digest, [errno.EACCES]

    def unknown(folder):
        raise manifest.Unreadable("no permission")

    def refuses(path):
        if path.name == "optimizer.safetensors" and "step-000006" in str(path):
            raise OSError(code[0], os.strerror(code[0]))
        return good(path)

    monkeypatch.setattr(manifest, "digest", refuses)
    with monkeypatch.context() as patch:  # nor when it would be tidied away
        patch.setattr(checkpoint, "unlisted", unknown)
        checkpoint.prune(folder, 6, 1)
    assert checkpoints(folder) == ["step-000003", "step-000006"]
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\): fix that"):
        run(folder.parent, **KIND, resume=True)
    assert checkpoints(folder) == ["step-000003", "step-000006"]
    code[0], said = errno.EIO, []
    assert saved_runs.newest(folder, said.append).step == 3
    assert "cannot be read (Input/output error): going back to step-000003" in said[0]


# ----------------------------------------------------------------------------- what the command line says
def test_weights_to_begin_with_are_needed_once(stopped, tmp_path):
    """A run resumes with the shape, weights and tokenizer of its checkpoint, even if the folder of --init has changed."""
    first = tmp_path / "first"
    shutil.copytree(stopped[0] / "checkpoints/step-000006", first)
    kind = KIND | dict(init=str(first), preset="tiny", vocab_size=None)
    whole = run(tmp_path / "whole", **kind)
    ours = run(tmp_path / "ours", **kind, stop_at=3)
    first.rename(tmp_path / "elsewhere")
    run(tmp_path / "ours", **kind, stop_at=6, resume=True)
    run(tmp_path / "ours", **kind | dict(init=None), resume=True)  # nor need it be said again
    assert_same_run(ours, whole)


def test_how_to_go_on(tmp_path, capsys):
    """The printed command is run as it is."""

    def ends(**more):
        said = Console(record=True, width=1000)
        run(tmp_path, said, **KIND | more)
        return next((x.split("  ")[-1].strip() for x in said.export_text().splitlines() if "continue this run" in x), "")  # fmt: skip

    words = f"python -m xtrain.train --out {shlex.quote(str(tmp_path))} --name run --resume"
    assert ends(stop_at=3) == words
    assert ends(time_limit="0.001", resume=True) == words
    assert main(shlex.split(words)[3:]) == 0 and "step 9" in capsys.readouterr().out
    assert ends(resume=True) == ""
    more = " --steps N --allow-change steps, N larger than 9"
    assert ends(resume=True, steps=5, allow_change=("steps",)) == words + more

    class Mine(Run): ...

    said = Console(record=True, width=1000)
    train(options(tmp_path, **KIND, name="mine", stop_at=3), said, make_run=Mine)
    assert "the same program with resume=True" in said.export_text()
