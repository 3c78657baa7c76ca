"""Write sections of the examples into the pages, so that GitHub shows them too.

    python lessons/tools/sections.py            rewrite the code between <!-- code:FILE:NAME -->
                                                and <!-- code:end -->
    python lessons/tools/sections.py --check    exit 1 if a page differs from the examples

A section of a file lies between the comments [start:NAME] and [end:NAME].
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "lessons").rglob("*.md"))
MARKER = re.compile(r"<!-- code:(?P<file>\S+\.py):(?P<name>\w+) -->\n.*?<!-- code:end -->", re.S)


def section(file: str, name: str) -> str:
    """Return a section of a file, without its indentation. Raises ValueError if there is none."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf"^ *# \[start:{name}\]\n(.*?)^ *# \[end:{name}\]$", text, re.M | re.S)
    if found is None:
        raise ValueError(
            f"{file} has no section {name}: put it between [start:{name}] and [end:{name}]"
        )
    return textwrap.dedent(found[1]).strip("\n")


def filled(text: str) -> str:
    """Return a page with the sections as they are now. Raises ValueError for an unknown one."""

    def code(marker: re.Match) -> str:
        body = section(marker["file"], marker["name"])
        begin, *_ = marker[0].partition("\n")
        return f"{begin}\n```python\n{body}\n```\n<!-- code:end -->"

    return MARKER.sub(code, text)


def main(check: bool) -> int:
    code = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text and check:
            print(f"{page.name} differs from the examples: run python lessons/tools/sections.py")
            code = 1
        elif new != text:
            page.write_text(new, encoding="utf-8")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    sys.exit(main(parser.parse_args().check))
