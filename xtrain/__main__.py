"""The programs:   python -m xtrain"""

import ast
import re
import sys
from pathlib import Path

from .cli import command_line


def main() -> int:
    """Every file that can be started, with what its docstring says first."""
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = file.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in text:
            first = ast.get_docstring(ast.parse(text)).split("\n")[0]
            print(f"python -m xtrain.{file.stem:13} {re.split(':?   ', first)[0]}")
    print("Each has --help. An overview: README.md; the pages: lessons/index.md")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
