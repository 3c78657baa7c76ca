"""The how-to pages: every command they name exists and takes the options that they give it."""

import contextlib
import functools
import importlib
import io
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "lessons/index.md", *ROOT.glob("lessons/howto/*.md"), *ROOT.glob("*.md")]
COMMAND = re.compile(r"python -m (xtrain\.\w+)((?:[^`\n#]|\\\n)*)")


@functools.cache
def help_of(module):
    out = io.StringIO()
    main = importlib.import_module(
        "xtrain.report.__main__" if module == "xtrain.report" else module
    ).main
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["--help"])
    return out.getvalue()


def commands():
    for page in PAGES:
        for module, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
            yield page.stem, module, rest.replace("\\\n", " ").split()


def test_there_are_commands_to_check():
    assert len(list(commands())) > 15


@pytest.mark.parametrize("page, module", sorted({(p, m) for p, m, _ in commands()}))
def test_options_exist(page, module):
    text = help_of(module)
    assert "--help" in text, f"{module} prints no help"
    used = {w for p, m, words in commands() if (p, m) == (page, module) for w in words}
    for option in sorted(w.split("=")[0] for w in used if w.startswith("--")):
        assert re.search(rf"{option}\b", text), f"{page}: {module} has no {option}"


@pytest.mark.parametrize(
    "module", ["train", "ddp", "generate", "chat", "report", "compare", "profile", "convert_meta"]
)
def test_every_option_says_what_it_is(module):
    """In words of its own: tyro gives a field without a comment that of the fields above it."""
    text = re.sub(r"[│╰╯╭╮─]", " ", help_of(f"xtrain.{module}"))
    said = {}
    for option, rest in re.findall(r"^  (--[a-z].*?)  +(.*?)(?=^  --[a-z]|\Z)", text, re.M | re.S):
        words = re.sub(r"\((default:.*|required|repeatable)\)", "", " ".join(rest.split())).strip()
        assert words, f"{module} {option} says nothing"
        assert words not in said, f"{module} {option} says what {said[words]} says: {words}"
        said[words] = option
    assert len(said) > 1


def test_the_programs_are_listed(capsys):
    programs = importlib.import_module("xtrain.__main__")
    assert programs.main([]) == 0
    said = re.findall(r"^xtrain (\w+) +\S.*\w", capsys.readouterr().out, re.M)
    assert sorted(said) == sorted([*PROGRAMS, "gradcheck", "completion"])
    assert {
        f.stem
        for f in (ROOT / "xtrain").glob("*.py")
        if f.stem != "cli" and "command_line(main)" in f.read_text()
    } == {*programs.COMMANDS.keys() - {"report"}, "__main__"}


def test_the_console_command(capsys):
    programs = importlib.import_module("xtrain.__main__")
    assert programs.main(["doctr"]) == 2 and "choose one of train, ddp" in capsys.readouterr().err
    assert programs.main(["completion", "fish"]) == 2
    assert "choose bash or zsh" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        programs.main(["convert-meta", "--help"])
    assert "--max-seq-len" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    "words, found",
    [
        (["ch"], {"chat"}),
        (["train", "--see"], {"--seed"}),
        (["lesson", "st"], {"start"}),
        (["generate", "--temp"], {"--temperature"}),
        (["completion", ""], {"bash", "zsh"}),
    ],
    ids=str,
)
def test_completion_in_bash(words, found, completion_script):
    line = " ".join(f"'{w}'" for w in ["xtrain", *words])
    code = f'. "$1"; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _xtrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", code, "-", completion_script], capture_output=True, text=True
    )
    assert set(done.stdout.split()) == found, done.stderr


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "xtrain.bash"
    path.write_text(importlib.import_module("xtrain.__main__").completion("bash"))
    return path


def test_help_names_what_can_be_chosen():
    from xtrain.config import PRESETS
    from xtrain.inspect.gradcheck import CASES

    presets = PRESETS.keys() - {"test", "killed"}  # other tests add these
    for module, names in (("train", presets), ("ddp", presets), ("gradcheck", CASES)):
        words = re.findall(r"\w+", help_of(f"xtrain.{module}"))
        assert set(names) <= set(words), module
    text = " ".join(re.sub(r"[│\s]+", " ", help_of("xtrain.train")).split())
    for option in {name for preset in PRESETS.values() for name in preset.train}:
        said = re.search(rf"--{option.replace('_', '-')} (.*?)\(default", text)[1]
        assert "none: the preset's" in said, option


PROGRAMS = (
    "train", "ddp", "generate", "chat", "report", "compare", "profile", "convert_meta", "lesson", "doctor"
)  # fmt: skip
OTHERS = {  # of other programs, of the benches, of `lesson start`
    "--force", "--hopper", "--kernel-name", "--local-dir", "--no-binary", "--only", "--oversubscribe", "--shots", "--strict", "--tool",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_options_in_the_text_exist(page):
    """Also those that stand alone, in tables and sentences."""
    said = set()
    for words in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        said |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", words))
    known = " ".join(help_of(f"xtrain.{program}") for program in PROGRAMS)
    assert [o for o in sorted(said - OTHERS) if not re.search(rf"{o}(?![\w-])", known)] == []


def test_presets_are_as_the_page_says():
    from xtrain.config import PRESETS, ModelConfig, TrainConfig, resolve
    from xtrain.training.memory_plan import parameters

    page = (ROOT / "lessons/howto/own_data.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)`[^|]*\| ([\d, of]+) \| ([\d.]+) \| ([\d x]+) \| (\d+) \|$", page, re.M
    )
    assert {row[0] for row in rows} == PRESETS.keys() - {"test", "killed"}
    for name, shape, millions, tokens, steps in rows:
        train, model = resolve(TrainConfig(preset=name), gpu=True)
        c = ModelConfig(vocab_size=train.vocab_size, **model)
        assert f"{c.n_layers}, {c.dim}, {c.n_heads} of {c.head_dim}" == shape
        assert f"{train.batch} x {train.seq_len}" == tokens and train.steps == int(steps)
        assert f"{parameters(c) / 1e6:.1f}" == millions, name


def test_presets_exist():
    from xtrain.config import PRESETS

    for page, module, words in commands():
        for name in (b for a, b in itertools.pairwise(words) if a == "--preset"):
            assert name in PRESETS or "--plan" in words, f"{page}: {module} has no preset {name}"


def test_export_and_serve_run(tmp_path, monkeypatch, capsys):
    """What the pages' Python does, and the command that then uses what it has written."""
    import xtrain
    from xtrain.data.tokenizer import Tokenizer
    from xtrain.generate import main

    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train(["Once upon a time def f(): pass " * 9], 300)
    shape = dict(vocab_size=tokenizer.vocab_size, dim=32, n_layers=1, n_heads=2, max_seq_len=1024)
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), seed=0, device="cpu")
    for folder in ("FOLDER", "runs/mine/checkpoints/step-003000"):
        model.save_pretrained(folder, tokenizer)
    for page in ("export", "serve"):
        text = (ROOT / f"lessons/howto/{page}.md").read_text(encoding="utf-8")
        blocks = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "import xtrain" in b]
        assert len(blocks) == 1
        exec(compile(blocks[0], page, "exec"), {})
    assert " length" in capsys.readouterr().out
    assert main(["--model", "my-model", "Once upon", "--max-new-tokens", "2"]) == 0


def test_the_example_of_the_simulator(tmp_path):
    """It is as the page says: right, and without the barrier an error."""
    text = (ROOT / "lessons/api.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    less = re.sub(r"^    cuda\.syncthreads.*\n", "", code, flags=re.M)
    assert less != code
    from xtrain.simulator import UninitializedError

    for name, source in (("right", code), ("wrong", less)):
        file = tmp_path / f"{name}.py"  # the simulator reads a kernel's file
        file.write_text(source, encoding="utf-8")
        space = {"__name__": name}
        run = functools.partial(exec, compile(source, str(file), "exec"), space)
        if name == "wrong":
            with pytest.raises(UninitializedError, match=r"tile\[1\]"):
                run()
        else:
            run()
            assert space["y"][:2].tolist() == [0.5, 1.5] and space["y"][63] == 31.5


def test_every_page_is_in_the_navigation_and_linked_from_the_index():
    lessons = ROOT / "lessons"
    pages = [str(p.relative_to(lessons)) for p in lessons.rglob("*.md") if p.name != "index.md"]
    nav, index = (
        p.read_text(encoding="utf-8") for p in (ROOT / "mkdocs.yml", lessons / "index.md")
    )
    assert len(pages) > 10
    for page in pages:
        assert re.search(rf": {re.escape(page)}$", nav, re.M), f"{page} is not in mkdocs.yml"
        assert f"]({page})" in index, f"{page} is not linked from index.md"


UNLISTED = re.compile(
    r"\.simulator\.|\.primitives\.|\.runtime\.overlap$|\.report\.|_bwd|_dkdv$|_parts$|_loops$|_table$|_tensor_cores$|_kernels$"
)


def test_the_reference_has_every_module():
    """Files that only other files of their room use are left out."""
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "lessons").rglob("api*/*.md"))
    pages += (ROOT / "lessons" / "api.md").read_text(encoding="utf-8")
    said = re.findall(r"^::: (\S+)$", pages, re.M)
    assert len(said) == len(set(said)) > 60
    for name in said:
        importlib.import_module(name)
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "xtrain").rglob("*.py")]
    modules = {".".join(p.parts) for p in files if p.stem[0] != "_" and len(p.parts) > 2}
    missing = {m for m in modules - set(said) if not UNLISTED.search(m)}
    assert not missing, f"on no page of lessons/api: {sorted(missing)}"
