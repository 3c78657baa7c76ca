"""Load a model and serve it: the command `xtrain serve`."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cli import say
from ..errors import UserError
from ..serving.engine import Engine
from ..serving.pretrained import load

MAX_SEQ_LEN = 8192  # tokens, if --max-seq-len is not given and the model supports more
SWITCH_SECONDS = 5e-4  # after which a thread that runs Python lets another: the engine must not wait for the HTTP side
LOCAL = ("127.0.0.1", "localhost", "::1")
LESS_MEMORY = "use a smaller model, a smaller --max-batch or --max-seq-len, --precision bf16, or --weights int8"


@dataclass(frozen=True)
class Options:
    """Serve a model over HTTP with OpenAI's API."""

    model: str  # a Hugging Face folder, or the folder of an xtrain run
    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines
    port: int = 8000
    # what clients must send; none: the variable XTRAIN_API_KEY of the environment, if it is set
    api_key: str | None = None
    name: str | None = None  # of the model for clients; none: the folder's
    max_batch: int = 32  # sequences at a time, the others wait
    # tokens of a sequence, prompt and answer; none: what the model supports, at most 8192
    max_seq_len: int | None = None
    max_queue: int = 256  # sequences that may wait; more are refused with 429
    max_body: int = 4 << 20  # bytes of a request
    timeout: float = 600.0  # seconds for a request
    drain: int = 30  # seconds that running answers get after SIGTERM
    # an answer does not depend on the other requests, not even by rounding
    batch_invariant: bool = False
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU that supports it
    # int8, fp8: matrices in one byte per weight, with a scale per row; full: as precision says
    weights: Literal["full", "int8", "fp8"] = "full"


def serve(options: Options) -> None:
    """Answer requests until SIGTERM (answers that are running are completed) or Ctrl-C.

    Raises UserError for invalid options or model folders, and if a package is missing.
    """
    o = options
    try:
        import uvicorn

        from .app import Limits, create_app
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install -e '.[serve]'") from None
    if not 0 < o.port < 65536:
        raise UserError(f"--port must be from 1 to 65535, got {o.port}")
    for name in ("max_queue", "max_body", "timeout", "drain"):
        if not getattr(o, name) > 0:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be positive, got {getattr(o, name)}")
    api_key = os.environ.get("XTRAIN_API_KEY") if o.api_key is None else o.api_key
    if api_key == "":
        raise UserError("the API key is empty: give one, or leave it out")
    p = load(o.model, o.device, o.precision)
    context = p.model.config.context
    size = min(context, MAX_SEQ_LEN) if o.max_seq_len is None else o.max_seq_len
    engine = Engine(p.model, o.max_batch, size, o.batch_invariant, warm_up=True, weights=o.weights)
    if api_key is None and o.host not in LOCAL:
        say(f"--host {o.host} without --api-key: every machine that reaches this one may use it")
    ready = f"; {engine.ready}" if engine.ready else ""
    say(f"{p.folder}; {engine.describe()}{ready}\nhttp://{o.host}:{o.port}/v1")
    name = o.name or Path(o.model).resolve().name  # of a run, not of its checkpoint
    app = create_app(engine, p, name, api_key, Limits(o.max_body, o.max_queue, o.timeout))
    sys.setswitchinterval(SWITCH_SECONDS)
    # After its shutdown uvicorn raises the signal again: SIGTERM is then no reason to fail.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = uvicorn.Server(
        uvicorn.Config(
            app, o.host, o.port, log_level="warning", timeout_graceful_shutdown=o.drain,
            server_header=False,
        )
    )  # fmt: skip
    try:
        server.run()
    except SystemExit:  # uvicorn has logged why
        raise UserError(f"cannot listen on {o.host}:{o.port}: choose another --port") from None
