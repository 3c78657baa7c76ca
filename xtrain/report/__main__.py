"""Look at a run:   python -m xtrain.report RUN [RUN2 ...] [--out FILE] [--sentence TEXT]

Of one run makes RUN/report.html, of several a comparison beside them. A page is one file: no scripts, nothing loaded from a
network, readable in every browser. Training writes it at its end; at any time before, this command does.

What the model does with one sentence (attention, next tokens) is in RUN/sentence.json, made at the end of training from
held-out text. Where it is missing, or with --sentence, the newest checkpoint is read and asked, on the CPU.
"""

import sys

import tyro

from ..cli import command, command_line
from .page import Options, make


@command("xtrain.report")
def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code."""
    o = tyro.cli(Options, prog="python -m xtrain.report", description=__doc__, args=arguments)
    print(make(o, lambda text: print(f"xtrain.report: {text}", file=sys.stderr)))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
