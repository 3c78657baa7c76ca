"""Load a model and serve it: the command `xtrain serve`."""

import contextlib
import dataclasses
import errno
import gc
import importlib.util
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..cli import say
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..formats.gguf_tensors import shown
from ..formats.texts import Texts
from ..serving.adapters import add_adapters
from ..serving.engine import Engine
from ..serving.options import (
    BatchInvariant,
    Draft,
    MaxBatch,
    MaxSeqLen,
    PrefillInterval,
    SharedOptions,
    chosen_seq_len,
    engine_arguments,
)
from ..serving.pretrained import ModelOptions
from .engine_loop import EngineLoop
from .grammars import Grammars
from .limits import Limits

PACKAGES = ("uvicorn", "httptools", "starlette", "pydantic", "prometheus_client")
LOCAL = ("127.0.0.1", "localhost", "::1")
LESS_MEMORY = (
    "use a smaller model, a smaller --max-batch or --max-seq-len, --precision bf16, or --weights "
    "int8"
)


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions, ModelOptions):
    """Serve a model over HTTP with OpenAI's API."""

    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines
    port: int = 8000  # of the HTTP server, 1 to 65535
    # what clients must send; none: the variable XTRAIN_API_KEY of the environment, if it is set
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # pages that may use it in a browser; "*": all
    name: str | None = None  # of the model for clients; none: the folder's
    # NAME=FOLDER of LoRA adapters, which clients choose as the model NAME
    adapter: tuple[str, ...] = ()
    max_batch: MaxBatch = 32
    max_seq_len: MaxSeqLen = None
    prefill_interval: PrefillInterval = None
    max_queue: int = 256  # sequences that may wait; more are refused with 429
    max_answers: int | None = None  # of one request; none: as many as there is room for
    max_body: int = 4 << 20  # bytes of a request
    timeout: float = 600.0  # seconds for a request
    drain: int = 30  # seconds that running answers get after SIGTERM
    # a line on standard error for each request, and one on the throughput every ten seconds
    access_log: bool = True
    # where OpenTelemetry sends a span of each request; none: nowhere
    otlp_traces_endpoint: str | None = None
    batch_invariant: BatchInvariant = False
    draft: Draft = None


def serve(options: Options) -> None:
    """Answer requests until SIGTERM (answers that are running are completed) or Ctrl-C.

    Raises UserError for invalid options or model folders, and if a package is missing.
    """
    o = options
    for package in PACKAGES:  # imported by the HTTP process only, while this one loads the model
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install -e '.[serve]'")
    if not 0 < o.port < 65536:
        raise UserError(f"--port must be from 1 to 65535, got {o.port}")
    for name in ("max_queue", "max_answers", "max_body", "timeout", "drain"):
        if (value := getattr(o, name)) is not None and not value > 0:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be positive, got {value}")
    if o.api_key is None:
        api_key = os.environ.get("XTRAIN_API_KEY")
    else:
        api_key = o.api_key
    if o.otlp_traces_endpoint is not None:
        from .tracing import tracer_provider

        tracer_provider(o.otlp_traces_endpoint).shutdown()  # are the packages there?
    if api_key == "":
        raise UserError("the API key is empty: give one, or leave it out")
    limits = Limits(o.max_body, o.max_queue, o.max_answers, o.timeout)
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(bound(o.host, o.port))  # before the model, which takes long
        http = stack.enter_context(HttpProcess(Address(o.host, o.port, sockets, o.drain)))
        _serve(o, api_key, http, limits)


def _serve(o: Options, api_key: str | None, http: "HttpProcess", limits: Limits) -> None:
    p = o.load()
    texts = Texts(**{field.name: getattr(p, field.name) for field in dataclasses.fields(Texts)})
    if texts.template is not None:
        texts.template.check()
    http.send(texts)
    defaults = GenerationDefaults.of(p.model.generation)
    name = o.name or Path(o.model).resolve().name  # of a run, not of its checkpoint
    folders = adapter_folders(o.adapter, name)
    if folders:
        add_adapters(p.model, folders)
    size = chosen_seq_len(o.max_seq_len, p.model.config.context)
    more = dict(max_seq_len=size, warm_up=True, draft_model=p.draft(o.draft))
    engine = Engine(p.model, **engine_arguments(o) | more)
    if api_key is None and o.host not in LOCAL:
        say(f"--host {o.host} without --api-key: every machine that reaches this one may use it")
    if engine.ready:
        ready = f"; {engine.ready}"
    else:
        ready = ""
    say(f"{shown(p.folder)}; {engine.describe()}{ready}")
    for note in defaults.notes({}, {"temperature": 1.0}):
        say(note)
    serve_engine(
        engine,
        texts,
        http,
        name=name,
        api_key=api_key,
        limits=limits,
        defaults=defaults,
        allowed_origins=o.allowed_origins,
        access_log=o.access_log,
        otlp_traces_endpoint=o.otlp_traces_endpoint,
        adapters=tuple(folders),
    )


def adapter_folders(given: Sequence[str], name: str) -> dict[str, Path]:
    """Return the folders of --adapter by their names. name: of the model. Raises UserError."""
    folders: dict[str, Path] = {}
    for text in given:
        chosen, equals, folder = text.partition("=")
        if not (chosen and equals and folder):
            raise UserError(f"--adapter {text!r} must be NAME=FOLDER")
        if chosen == name or chosen in folders:
            raise UserError(f"--adapter {text!r}: another model has this name: choose another one")
        folders[chosen] = Path(folder)
    return folders


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Return sockets that are bound to the addresses of a host. Raises UserError."""
    with contextlib.ExitStack() as stack:
        sockets = []
        error: OSError | None = None
        try:
            places = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, address in dict.fromkeys(places):
                try:
                    one = stack.enter_context(socket.socket(family, kind, protocol))
                    if os.name == "posix":  # on Windows it would allow a second server
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind(address)
                    sockets.append(one)
                except OSError as refused:  # for instance a machine without IPv6
                    error = refused
                    if refused.errno == errno.EADDRINUSE:
                        raise
        except OSError as refused:
            sockets = []
            error = refused
        if not sockets and error is not None:
            raise UserError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another --port or --host"
            )
        yield sockets


@dataclass(frozen=True)
class Address:
    """Where to listen.   sockets: bound.  drain: seconds that running answers get at the end"""

    host: str
    port: int
    sockets: list[socket.socket]
    drain: int = 30


class HttpProcess:
    """The process of the HTTP side. It imports its packages while this one loads the model, and
    needs the Texts and what `serve_engine` sends to listen.

    As a context it ends with the block.
    """

    def __init__(self, address: Address):
        spawn = multiprocessing.get_context("spawn")  # a fork could not use CUDA, nor threads
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_http, args=(theirs, address), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it inherits that: Ctrl-C is for us
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        for one in address.sockets:  # the other process has its own
            one.close()

    def __enter__(self) -> "HttpProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def send(self, message: Any) -> None:
        """Send what the process waits for. If it has ended, `serve_engine` will notice."""
        with contextlib.suppress(OSError):
            self.connection.send(message)


def serve_engine(engine: Engine, texts: Texts, http: HttpProcess, **options: Any) -> None:
    """Answer requests until SIGTERM or Ctrl-C: the HTTP side in a process of its own, the engine in
    this thread.

    texts: as sent to the HTTP side.
    options: of create_app. Raises RuntimeError if one of the two fails.
    """
    process = http.process
    signals: list[int] = []

    def forward(number: int, frame: Any) -> None:
        # First SIGTERM, which does the same: until it listens, the process ignores Ctrl-C.
        sent = number if signals else signal.SIGTERM
        signals.append(number)
        if process.is_alive():
            os.kill(process.pid or 0, sent)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        http.send(((engine.config, engine.max_seq_len, engine.max_batch), options))
        EngineLoop(engine, http.connection, Grammars.of(texts)).run()
        process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if process.exitcode and not signals:
        raise RuntimeError(f"the HTTP process ended with exit code {process.exitcode}")


def _http(connection: Connection, address: Address) -> None:
    """Run the HTTP process."""
    os.setpgid(0, 0)  # Ctrl-C goes to the engine's process, which forwards it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app import create_app
    from .engine_client import EngineClient
    from .protocol import HttpServer

    def lost(*_: Any) -> None:
        server.should_exit = True

    try:
        texts = connection.recv()
        facts, options = connection.recv()
    except EOFError:  # the model could not be loaded, or the start was interrupted
        return
    client = EngineClient(connection, *facts)
    client.lost = lost
    app = create_app(client, texts, **options)
    gc.freeze()  # a collection that visits all that imports have made takes long
    server = HttpServer(app, address.host, address.port, address.drain)
    # After its shutdown uvicorn raises the signal again: it is then no reason to fail.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lost)
    server.run(sockets=address.sockets)
