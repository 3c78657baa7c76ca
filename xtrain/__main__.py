"""The commands:   xtrain COMMAND [OPTIONS]   (or python -m xtrain.COMMAND)"""

import ast
import contextlib
import importlib
import io
import re
import sys
from pathlib import Path

from .cli import command, command_line, print_text
from .errors import UserError
from .version import VERSION

COMMANDS = {  # the command's name -> its module
    "train": "xtrain.train",
    "finetune": "xtrain.finetune",
    "prefer": "xtrain.prefer",
    "reinforce": "xtrain.reinforce",
    "ddp": "xtrain.ddp",
    "generate": "xtrain.generate",
    "chat": "xtrain.chat",
    "evaluate": "xtrain.evaluate",
    "serve": "xtrain.serve",
    "report": "xtrain.report.__main__",
    "compare": "xtrain.compare",
    "profile": "xtrain.profile",
    "gradcheck": "xtrain.gradcheck",
    "export": "xtrain.export",
    "lesson": "xtrain.lesson",
    "doctor": "xtrain.doctor",
}
COMPLETION = """# Completion of the command xtrain:   eval "$(xtrain completion {shell})"
{first}_xtrain() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
        case "$word" in -*) ;; *) [ -n "$words" ] && case "$words" in --*) words="" ;; esac ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _xtrain xtrain
"""


def summary(module: str) -> str:
    """Return the first line of a command's docstring. The module is not imported."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(":?   ", text.split("\n")[0])[0]


def overview() -> str:
    """Return one line per command: its name and the first line of its docstring."""
    lines = [f"xtrain {name:13} {summary(module)}" for name, module in COMMANDS.items()]
    lines.append("xtrain completion    a script that completes these commands in bash or zsh")
    lines.append("xtrain --version     the version")
    lines.append("Each command has --help. Overview: README.md. Documentation: lessons/index.md")
    return "\n".join(lines)


def options(module: str) -> list[str]:
    """Return the long options of a command: those that begin a line of its --help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    names = re.findall(r"^  (?:-h, )?(--[\w-]+)(?:, (--no-[\w-]+))?", said.getvalue(), re.M)
    return sorted({name for pair in names for name in pair if name})


def completion(shell: str) -> str:
    """Return a script for bash or zsh. Raises UserError for any other shell."""
    if shell not in ("bash", "zsh"):
        raise UserError(f"no completion for {shell or 'no shell'}: choose bash or zsh")
    cases = {name: " ".join(options(module)) for name, module in COMMANDS.items()}
    cases["lesson"] = "list start check " + cases["lesson"]
    cases["completion"] = "bash zsh"
    return COMPLETION.format(
        shell=shell,
        first="" if shell == "bash" else "autoload -U +X bashcompinit && bashcompinit\n",
        commands=" ".join(cases),
        cases="\n".join(f'            {name}) words="{words}" ;;' for name, words in cases.items()),
    )


@command("xtrain", one_process=False)  # each command decides
def main(arguments: list[str] | None = None) -> int:
    """Run a command, or list them. -> exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print_text(overview())
        return 0
    if name == "--version":
        print_text(f"xtrain {VERSION}")
        return 0
    if name == "completion":
        print_text(completion(*rest[:1] or [""]), end="")
        return 0
    module = COMMANDS.get(name.replace("-", "_"))
    if module is None:
        raise UserError(f"there is no command {name!r}: choose one of {', '.join(COMMANDS)}")
    return importlib.import_module(module).main(rest)


def entry() -> int:
    """Return the console script `xtrain`."""
    return command_line(main)


if __name__ == "__main__":
    sys.exit(command_line(main))
