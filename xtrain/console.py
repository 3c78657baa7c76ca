"""Rich's console for tables, progress bars and log lines, whose text cannot control the
terminal."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from .cli import printable


class PrintableConsole(rich.console.Console):
    """A rich console that prints text as cli.printable: only rich itself moves the cursor and
    chooses colors."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        if self.is_jupyter:  # rich would need ipywidgets, and ignore `file`: print plain lines
            super().__init__(**options | {"force_jupyter": False, "force_terminal": False})

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of anything printable; those in which rich controls the terminal are
        unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
