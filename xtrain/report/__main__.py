"""Write the page of a run:   python -m xtrain.report RUN [RUN2 ...] [--out FILE] [--sentence TEXT]
Watch a run that trains:   python -m xtrain.report --live RUN [--port 8790]

One run: RUN/report.html. Several runs: a comparison, compare.html, in the folder that contains the
first run. A page is one file that loads nothing from a network. Training writes the page at its
end; this command writes it at any time. With --live the page is not written but served, at
http://127.0.0.1:8790/ for this machine alone, and follows the run until Ctrl-C.

The page shows the model's attention and next tokens for one sentence. Training computes this from
held-out text and stores it in RUN/sentence.json. If that file is missing, or with --sentence, the
newest checkpoint computes it, on the CPU.
"""

import contextlib
import sys

from ..cli import command, command_line, print_text, say
from ..options import parse
from .live import Server
from .page import Options, write_requested


@command("xtrain.report")
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    o = parse(Options, "python -m xtrain.report", __doc__, arguments)
    o.validate()
    if o.live:
        with Server(o.runs[0], o.port) as server:
            print_text(server.url, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return 0
    print_text(str(write_requested(o, lambda text: say(f"xtrain.report: {text}"))))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
