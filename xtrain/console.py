"""Rich's console for tables, progress bars and log lines, whose text cannot control the
terminal."""

import os
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.rule import Rule
from rich.segment import Segment

from .cli import printable

UNLIMITED = 1_000_000  # columns
RULE = 100  # columns


class PrintableConsole(rich.console.Console):
    """A rich console that prints text as cli.printable: only rich itself moves the cursor and
    chooses colors.

    Where no terminal is, a line stays a line, however long: its width is COLUMNS, or unlimited.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        if self.is_jupyter:  # rich would need ipywidgets, and ignore `file`: print plain lines
            super().__init__(**options | {"force_jupyter": False, "force_terminal": False})
        has_width = options.get("width") is not None or "COLUMNS" in os.environ
        if not (self.is_terminal or has_width):
            self.width = UNLIMITED

    def rule(self, *title: Any, **options: Any) -> None:
        """Print a line with a title, at most RULE columns wide."""
        self.print(Rule(*title, **options), width=min(self.width, RULE))

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Yield the segments of anything printable; those in which rich controls the terminal are
        unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
