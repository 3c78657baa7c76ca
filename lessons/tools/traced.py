"""Run a program of the playground, and record its last launch as a page of the stepper.

    python lessons/tools/traced.py lessons/playground/rotate.py page.html

The site's build runs the programs here, so that a page shows their steps before Python has been loaded into it. There
browser/python/in_browser.py runs what the reader has written.
"""

import contextlib
import io
import linecache
import sys
import traceback
from pathlib import Path
from typing import Any

from xtrain.simulator.errors import KernelError
from xtrain.simulator.observers import observe
from xtrain.simulator.stepper import Stepper


class LastLaunch(Stepper):
    """A recording of the last launch, not of the first one."""

    def begin(self, block: Any) -> None:
        """Forget the launch before."""
        if self.launch is not None and block.launch is not self.launch:
            vars(self).update(vars(type(self)(self.of)))
        super().begin(block)


def run(source: str, name: str) -> dict[str, str]:
    """Run a program. source: its text. name: what reports call it.

    Returns printed: what it has written to standard output. error: the report of a kernel's mistake or of a failed
    assertion, or "". page: the stepper's page, or "" if no kernel was launched.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed = io.StringIO()
    recording = LastLaunch()
    error = ""
    with contextlib.redirect_stdout(printed), observe(recording):
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": name})
        except KernelError as finding:
            error = f"{type(finding).__name__}: {finding}"
        except AssertionError as wrong:
            error = "".join(traceback.format_exception_only(wrong)).rstrip()
    page = ""
    if recording.launch is not None:
        page = recording.page()
    return {"printed": printed.getvalue(), "error": error, "page": page}


def main() -> int:
    """Returns 1 if the program has ended with an error."""
    file, page = map(Path, sys.argv[1:])
    found = run(file.read_text(encoding="utf-8"), file.name)
    page.write_text(found["page"], encoding="utf-8")
    print(found["printed"], found["error"], sep="")
    return 1 if found["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
