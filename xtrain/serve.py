"""Serve a model over HTTP:   python -m xtrain.serve --model FOLDER [--port 8000] [--api-key KEY] ...

OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models; Anthropic's
/v1/messages; vLLM's /tokenize and /detokenize; and /livez, /readyz, /metrics, /openapi.json. FOLDER:
a Hugging Face folder, or a run of xtrain.train. Needs the packages of pip install -e '.[serve]'.
"""

import sys

from .cli import command, command_line
from .options import parse
from .server.listen import LESS_MEMORY, Options, serve


@command("xtrain.serve", less_memory=LESS_MEMORY)
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    serve(parse(Options, "python -m xtrain.serve", __doc__, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
