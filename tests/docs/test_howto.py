"""The pages: every command and file that they name exists, and every command accepts the options shown."""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import pkgutil
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from xtrain import __main__ as programs

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "lessons/tools"
FOLDERS = ("lessons", "lessons/howto", "lessons/notes", ".")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
# `python -m xtrain.NAME` anywhere, `xtrain NAME` at the start of a command or after mpirun; then its arguments
COMMAND = re.compile(
    r"(?:python -m xtrain\.|(?:^ *|[&|;(] *|mpirun -n \d+ )xtrain +)(\w+)(?![\w.])((?:\\\n|[^`\n#&|;])*)",
    re.M,
)


@functools.cache
def help_of(name, *job):
    out = io.StringIO()
    main = importlib.import_module(programs.COMMANDS[name]).main
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*job, "--help"])
    return out.getvalue()


def shell_code(text):
    """The shell blocks and the inline code of a page, one piece per line."""
    blocks = [code for language, code in FENCE.findall(text) if language in ("", "sh")]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


def commands():
    """-> (page, command, its arguments) of every command on the pages"""
    for page in PAGES:
        for name, rest in COMMAND.findall(shell_code(page.read_text(encoding="utf-8"))):
            if not name.isupper() and name != "completion":  # COMMAND stands for any of them
                yield page.stem, name.replace("-", "_"), rest.replace("\\\n", " ").split()


def test_both_forms_of_a_command_are_found():
    text = """Prose: xtrain trains. `xtrain doctor` and
```sh
pip install . && xtrain train --steps 5  # comment
    xtrain generate --model a \\
    --stream
mpirun -n 2 python -m xtrain.ddp --zero 1
mpirun -n 2 xtrain finetune --pack
```
```python
from xtrain import lesson
```
"""
    found = [(name, rest.split()) for name, rest in COMMAND.findall(shell_code(text))]
    assert found == [
        ("train", ["--steps", "5"]),
        ("generate", ["--model", "a", "\\", "--stream"]),
        ("ddp", ["--zero", "1"]),
        ("finetune", ["--pack"]),
        ("doctor", []),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_runs_of_a_page_have_their_own_names(page):
    """A name that is taken is refused, and without --name the second run is `finetune-2`: what the
    page then says about runs/finetune would be about the first."""
    runs = []
    blocks = [code for _, code in FENCE.findall(page.read_text(encoding="utf-8"))]
    for command, rest in COMMAND.findall("\n".join(blocks)):
        words = rest.replace("\\\n", " ").split()
        for name in re.findall(r"\bruns/([\w-]+)", rest):
            assert runs.count(name) <= 1, f"{page.name}: {command}: which {name}?"
        if (
            command in ("train", "ddp", "finetune", "prefer", "reinforce")
            and "--resume" not in words
        ):
            name = command
            if "--name" in words:
                name = words[words.index("--name") + 1]
                assert name not in runs, f"{page.name}: {command}: {name} exists"
            runs.append(name)


def test_there_are_commands_to_check():
    assert len(list(commands())) > 40


@pytest.mark.parametrize("page, command", sorted({(p, c) for p, c, _ in commands()}))
def test_options_exist(page, command):
    jobs = {words[0] for p, c, words in commands() if (p, c) == (page, command) and words}
    text = help_of(command) + "".join(
        help_of(command, job) for job in sorted(jobs & {"finetune", "check"})
    )
    assert "--help" in text, f"{command} prints no help"
    used = {w for p, c, words in commands() if (p, c) == (page, command) for w in words}
    for option in sorted(w.split("=")[0] for w in used if w.startswith("--")):
        assert re.search(rf"{option}\b", text), f"{page}: {command} has no {option}"


# written by a command
FILES = {
    "my_lessons/01_threads.py", "sorting/chats.jsonl", "sorting/prompts.jsonl", "sorting/test.jsonl",
    "guessing/prompts.jsonl", "captain/chats.jsonl", "captain/sums.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_on_the_page_exist(page):
    """Paths are relative to the repository, to xtrain/ or to the page. NAME and NN stand for any name."""
    text = page.read_text(encoding="utf-8")
    said = set(re.findall(r"(?<![\w/.*-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md|jsonl)\b", text)) - FILES
    wanted = {s for s in said if not re.search("NAME|NN", s)}
    there = lambda s: any((folder / s).exists() for folder in (ROOT, ROOT / "xtrain", page.parent))
    assert [s for s in sorted(wanted) if not there(s)] == []


# of another program; a name to fill in
ELSEWHERE = {"lm_eval/api/model.py", "my_lessons/NN_name.py"}


def test_files_that_the_source_names_exist():
    """In comments, docstrings and messages of xtrain/. A path may begin at any folder of the repository."""
    files = [f"/{p.relative_to(ROOT).as_posix()}" for p in ROOT.glob("[!.]*/**/*.*")]
    said = {
        (source.name, path)
        for source in (ROOT / "xtrain").rglob("*.py")
        for path in re.findall(
            r"(?<![\w/.*{}-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md)\b", source.read_text(encoding="utf-8")
        )
    }
    assert len(said) > 50
    there = lambda path: path in ELSEWHERE or any(f.endswith(f"/{path}") for f in files)
    assert sorted((name, path) for name, path in said if not there(path)) == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "CHANGELOG"], ids=lambda p: p.stem)
def test_names_on_the_page_exist(page):
    """Names such as `xtrain.train.train` can be imported. The changelog also has names of the past."""
    text = page.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"(?<![\w/.-])xtrain(?:\.[a-z_]\w*)+", text))):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{page.name} names {name}: {error}")


@pytest.mark.parametrize(
    "module",
    [
        "train",
        "ddp",
        "generate",
        "chat",
        "serve",
        "finetune",
        "prefer",
        "reinforce",
        "evaluate",
        "report",
        "compare",
        "profile",
        "export",
    ],
)
def test_every_option_says_what_it_is(module):
    """Each help text is different."""
    said = {}
    for option, rest in re.findall(r"^  (--[a-z].*?)(?:  +(.*))?$", help_of(module), re.M):
        words = re.sub(r"\((default:.*|required)\)", "", rest).strip()
        assert words, f"{module} {option} has no help text"
        assert words not in said, f"{module} {option} has the help text of {said[words]}: {words}"
        said[words] = option
    assert len(said) > 1


def test_the_programs_are_listed(capsys):
    assert programs.main([]) == 0
    said = re.findall(r"^xtrain (\w+) +\S.*\w", capsys.readouterr().out, re.M)
    assert said == [*programs.COMMANDS, "completion"]
    files = {
        f.stem for f in (ROOT / "xtrain").glob("*.py") if "command_line(main)" in f.read_text()
    }
    different = (files - {"cli", "__main__"}) ^ (programs.COMMANDS.keys() - {"report"})
    assert not different, f"{different}: add it to COMMANDS in xtrain/__main__.py"


def test_the_console_command(capsys):
    assert programs.main(["--version"]) == 0
    assert capsys.readouterr().out == f"xtrain {importlib.import_module('xtrain').__version__}\n"
    assert (
        programs.main(["doctr"]) == 2 and "choose one of train, finetune" in capsys.readouterr().err
    )
    assert programs.main(["completion", "fish"]) == 2
    assert "choose bash or zsh" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    "words, found",
    [
        (["ch"], ["chat"]),
        (["train", "--see"], ["--seed"]),
        (["lesson", "st"], ["start"]),
        (["generate", "--temp"], ["--temperature"]),
        (["completion", ""], ["bash", "zsh"]),
    ],
    ids=str,
)
def test_completion_in_bash(words, found, completion_script):
    line = " ".join(f"'{w}'" for w in ["xtrain", *words])
    code = f'. "$1"; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _xtrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", code, "-", completion_script], capture_output=True, text=True
    )
    assert sorted(done.stdout.split()) == found, done.stderr


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "xtrain.bash"
    path.write_text(programs.completion("bash"))
    return path


def test_completion_offers_the_options_of_a_command_and_no_others():
    """Not those of mpirun, which the description names; also names with digits."""
    from xtrain.config import TrainConfig

    fields = dataclasses.fields(TrainConfig)
    expected = {"help", "config"} | {f.name.replace("_", "-") for f in fields}
    expected |= {f"no-{f.name.replace('_', '-')}" for f in fields if f.type is bool}
    for module in ("xtrain.train", "xtrain.ddp"):
        assert programs.options(module) == sorted(f"--{name}" for name in expected)
    assert programs.options("xtrain.doctor") == ["--help", "--json"]


def test_help_names_what_can_be_chosen():
    from xtrain.config import PRESETS
    from xtrain.inspect.gradcheck import CASES

    presets = PRESETS.keys() - {"test", "killed"}  # presets that other tests add
    for module, names in (("train", presets), ("ddp", presets), ("gradcheck", CASES)):
        words = re.findall(r"\w+", help_of(module))
        assert set(names) <= set(words), module
    text = help_of("train")
    for option in {name for preset in PRESETS.values() for name in preset.train}:
        said = re.search(rf"^  --{option.replace('_', '-')} (.*)", text, re.M)[1]
        assert "none: the preset's" in said, option


OTHERS = {  # options of other programs, of the benches, of `lesson start`
    "--allow", "--apart", "--check", "--cuda-allow", "--cuda-enable", "--cuda-processes", "--cuda-report", "--cuda-schedules", "--cuda-seed", "--emulate", "--enable", "--force", "--hopper", "--install", "--kernel-name", "--local-dir", "--no-binary", "--only", "--oversubscribe", "--schedules", "--shm-size", "--shots", "--simulate-cuda", "--strict", "--time-only", "--tool", "--version",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_options_in_the_text_exist(page):
    """Options in tables and sentences, too."""
    said = set()
    for words in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        said |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", words))
    from xtrain.option_words import HINTS, OTHER_NAMES

    known = " ".join(help_of(program) for program in programs.COMMANDS)
    known += "".join(f" --{word}" for others in OTHER_NAMES.values() for word in others.split())
    known += "".join(f" --{word}" for word in HINTS)
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


def test_the_family_is_as_the_page_says():
    from xtrain import family
    from xtrain.config import ModelConfig, TrainConfig, resolve

    page = (ROOT / "lessons/howto/own_data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (.*) \|$", page, re.M)
    assert len(rows) == 4
    for depth, width, rest in rows:
        c, shape = resolve(TrainConfig(depth=int(depth)), gpu=True)
        model = ModelConfig(vocab_size=c.vocab_size, **shape)
        tokens = c.steps * c.batch * c.seq_len
        size = f"{family.parameters(model) / 1e6:.1f}"
        cells = [size, f"{c.batch} x {c.seq_len}", f"{c.lr}", f"{c.steps}", f"{tokens / 1e9:.2f}"]
        assert (model.dim, cells) == (int(width), rest.split(" | "))


def test_presets_exist():
    from xtrain.config import PRESETS

    for page, command, words in commands():
        for name in (b for a, b in itertools.pairwise(words) if a == "--preset"):
            assert name in PRESETS or "--plan" in words, f"{page}: {command} has no preset {name}"


def test_export_and_serve_run(tmp_path, monkeypatch, capsys):
    """Run the Python code of the pages, then a command that uses its output."""
    import xtrain
    from xtrain.data.tokenizer import Tokenizer
    from xtrain.generate import main

    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.train(["Once upon a time def f(): pass " * 9], 300)
    shape = dict(vocab_size=tokenizer.vocab_size, dim=32, n_layers=1, n_heads=2, max_seq_len=128)
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
    """It runs correctly, and without the barrier it raises the error that the page names."""
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
    notes = (lessons / "notes/index.md").read_text(encoding="utf-8")
    for page in pages:
        assert re.search(rf": {re.escape(page)}$", nav, re.M), f"{page} is not in mkdocs.yml"
        folder, _, name = page.rpartition("/")
        linked = f"]({name})" in notes if folder == "notes" else f"]({page})" in index
        assert linked or page == "notes/index.md", f"{page} is not linked from an index"


UNLISTED = re.compile(
    r"\.simulator\.|_simulated$|\.report\.|_bwd|_dkdv$|_parts$|_loops$|_table$|_tensor_cores$|_kernels$|_search$|_code$|_changes$"
    r"|_four_bits$|_heads$|_schedule$|_sequences$|_operands$|\.nn\.((loss|expert)_)?functions$"
)


def test_the_reference_has_every_module():
    """Except files that are used only within their room."""
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "lessons").rglob("api*/*.md"))
    pages += (ROOT / "lessons" / "api.md").read_text(encoding="utf-8")
    said = re.findall(r"^::: (\S+)$", pages, re.M)
    assert len(said) == len(set(said)) > 60
    for name in said:
        importlib.import_module(name)
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "xtrain").rglob("*.py")]
    modules = {".".join(p.parts) for p in files if p.stem[0] != "_" and len(p.parts) > 2}
    missing = {m for m in modules - set(said) if not UNLISTED.search(m)}
    assert not missing, (
        f"{sorted(missing)}: write `::: MODULE` on a page of lessons/api, or add it to UNLISTED"
    )


# ----------------------------------------------------------------------------- code of the examples
def test_pages_show_the_examples_as_they_are():
    """In the Markdown itself, which GitHub shows, too."""
    tool = runpy.run_path(str(TOOLS / "sections.py"))
    shown = 0
    for page in tool["PAGES"]:
        text = page.read_text(encoding="utf-8")
        shown += len(tool["MARKER"].findall(text))
        assert tool["filled"](text) == text, f"{page}: run python lessons/tools/sections.py"
        assert "--8<--" not in text and text.count("<!-- code:") == text.count("-->\n```python") * 2
    assert shown >= 25
    old = "<!-- code:examples/own_loop.py:use -->\nold\n<!-- code:end -->"
    assert "model.save_pretrained" in tool["filled"](old) and "old" not in tool["filled"](old)
    with pytest.raises(ValueError, match=r"own_loop\.py has no section nothing"):
        tool["filled"](old.replace(":use", ":nothing"))
