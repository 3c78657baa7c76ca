"""Attempts in processes of their own, which hold no answers. The judge stays in this process and compares.

    judge's process                        template                      process of an attempt
    Runner(template, file, exercise)  ->   forks                    ->   loads the reader's file
    runner.call(x, f)                 -------- call ------------------>  work(x, f)
                                      <------- call f ----------------   f(y)       the judge's function
                                      -------- its result ------------>
                                      <------- the result ------------

The template is forked before this process has imported an answer (in a process that has, a fresh interpreter takes its
place), so an attempt finds no answer in its memory. refuse_answers() keeps it from reading one from a file. All ranks of
an attempt have a process each: they share no variables.

Both ends are Channels (channel.py).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from xtrain.lesson import load_checks

from . import running
from .channel import Channel
from .running import Facts, Ran, Wrong
from .trace import Access

ROOT = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------- the accesses of a trace
def packed(accesses: list[Access]) -> tuple[list, np.ndarray]:
    """-> names and kinds of the arrays, a row of integers for each access"""
    names = list(dict.fromkeys(a[:2] for a in accesses))
    number = {name: i for i, name in enumerate(names)}
    rows = [(number[a[:2]], a.write, *a.block, *a[4:]) for a in accesses]
    return names, np.array(rows, np.int64).reshape(len(rows), 12)


def unpacked(names: list, rows: np.ndarray) -> list[Access]:
    return [
        Access(*names[i], bool(write), (x, y, z), *rest)
        for i, write, x, y, z, *rest in rows.tolist()
    ]


# ----------------------------------------------------------------------------- the judge's end
class Runner:
    """The reader's function in a separate process: running.Runner describes the methods.

    file: the reader's. Raises Wrong if it has no function of this name, or an error of the file.
    """

    def __init__(
        self, template: "Template", file: Path, text: str, name: str, allow: frozenset[str]
    ):
        self.template, self.given = template, (str(file), text, name, sorted(allow))
        self.ranks: dict[int, Runner] = {}
        self.steps = False
        self.pid, connection = template.attempt()
        self.channel = Channel(connection, "j", False, contextlib.nullcontext, lambda error: "")
        try:
            self.channel.request("call", "load", *self.given)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for runner in self.ranks.values():
            runner.close()
        self.channel.connection.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def of_rank(self, rank: int) -> "Runner":
        if rank not in self.ranks:
            file, text, name, allow = self.given
            self.ranks[rank] = Runner(self.template, Path(file), text, name, frozenset(allow))
        return self.ranks[rank]

    def facts(self) -> Facts:
        return Facts(*self._ask("facts"))

    def read(self, question) -> Any:
        return self._ask("read", question.__module__.split(".")[-1], question.__name__)

    def call(self, *args, **options) -> Any:
        return self._ask("work", args, options)

    def call_measured(self, *args, **options) -> tuple[Any, int]:
        return self._ask("measured", args, options)

    def guarded(self):
        return contextlib.nullcontext()  # the other process watches its functions

    def line_of(self, error) -> str:
        return getattr(error, "line", "")

    def run(self, grid, block, args, shared, trace, steps) -> Ran:
        self.steps = steps
        *ran, accesses = self._ask("run", grid, block, args, shared, trace, steps)
        if trace:
            accesses = unpacked(*accesses)
        return Ran(*ran, accesses)

    @property
    def stepper(self) -> "Runner | None":
        return self if self.steps else None

    def page(self) -> str:
        """The page of the run of the last kernel."""
        return self._ask("page")

    def _ask(self, name, *args):
        return self.channel.request("call", name, *args)


class Template:
    """A process without answers, which forks one process for each attempt."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        package = __package__
        if any(name.startswith(f"{package}.lesson_") for name in sys.modules):
            code = "import sys; from xtrain.lesson import load_checks; load_checks('process').serve(int(sys.argv[1]))"
            paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
            subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
        elif os.fork() == 0:
            self.control.close()
            serve(theirs.detach())
        theirs.close()
        self.known: set[str] = set()
        self.lock = threading.Lock()

    def prepare(self, code: str) -> None:
        """Run trusted code, the imports of a lesson, once for all attempts."""
        with self.lock:
            if code not in self.known:
                self.known.add(code)
                self._send(code.encode())
                self.control.recv(1)

    def attempt(self) -> tuple[int, Connection]:
        """-> the process id of a new attempt, a connection to it."""
        ours, theirs = socket.socketpair()
        with self.lock:
            socket.send_fds(self.control, [(0).to_bytes(8, "big")], [theirs.fileno()])
            theirs.close()
            pid = int.from_bytes(self.control.recv(8), "big")
        return pid, Connection(ours.detach())

    def _send(self, code: bytes) -> None:
        self.control.sendall(len(code).to_bytes(8, "big") + code)


def can_fork() -> bool:
    has_names = hasattr(os, "fork") and hasattr(socket, "send_fds")
    return has_names and sys.platform != "emscripten"  # a browser has the names only


_template: list[Template] = []


def template() -> Template:
    """The template of this process."""
    if not _template:
        _template.append(Template())
    return _template[0]


# ----------------------------------------------------------------------------- the attempt's end
def serve(number: int) -> None:
    """The main function of the template. number: of the socket to the judge. Does not return."""
    control = socket.socket(fileno=number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        data, sockets, _, _ = socket.recv_fds(control, 8, 1)
        if not data:
            os._exit(0)
        if not sockets:
            code = control.recv(int.from_bytes(data, "big"), socket.MSG_WAITALL).decode()
            with contextlib.suppress(Exception):  # the attempt has the same imports and their error
                exec(code, {"__name__": "imports"})
            control.sendall(b"1")
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _attempt(Connection(sockets[0]))
        os.close(sockets[0])
        control.sendall(pid.to_bytes(8, "big"))


def _attempt(connection: Connection) -> None:
    """The main function of the process of an attempt. Does not return."""
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # input() must not wait
        sys.stdin = os.fdopen(0, closefd=False)
        here = _Here()
        channel = Channel(connection, "a", True, here.guarded, here.line_of)
        channel.operations["call"] = here.call
        with running.time_limit():
            while True:
                head, arguments = channel.receive()
                channel.answer(head["do"], arguments)
    os._exit(0)


class _Here:
    """What the judge may ask for."""

    def __init__(self):
        self.runner: running.Runner | None = None
        self.modules = {m: sys.modules[m] for m in sys.modules if m.startswith(__package__)}

    def call(self, name, *args):
        return getattr(self, name)(*args)

    def load(self, file, text, name, allow):
        for module in self.modules:
            del sys.modules[module]  # what an attempt changes there has no effect on this code
        refuse_answers(self)
        self.runner = running.load_attempt(text, file, name, frozenset(allow))

    def guarded(self):
        return self.runner.guarded()

    def line_of(self, error):
        return self.runner.line_of(error) if self.runner else ""

    def facts(self):
        facts = self.runner.facts()
        return tuple(getattr(facts, name) for name in Facts.__dataclass_fields__)

    def read(self, module, name):
        known = self.modules.get(f"{__package__}.{module}") or load_checks(module)
        return self.runner.read(getattr(known, name))

    def work(self, args, options):
        return self.runner.call(*args, **options)

    def measured(self, args, options):
        return self.runner.call_measured(*args, **options)

    def run(self, *arguments):
        ran = self.runner.run(*arguments)
        accesses = None if ran.accesses is None else packed(ran.accesses)
        return ran.wrote, ran.writers, ran.wide, ran.atomics, ran.global_atomics, accesses

    def page(self):
        return self.runner.stepper.page()


def _may_hold_answers(path: Path) -> bool:
    """Is it a lesson, a judge (also compiled, in another folder) or a test?"""
    if "checks" in path.parts and path.name.startswith("lesson_"):
        return True
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    return parts[:1] == ("tests",) or (parts[:1] == ("lessons",) and len(parts) == 2)


REFUSED = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"}


def refuse_answers(here: _Here) -> None:
    """From now on this process cannot open the lessons, their checks and tests, start a program or stop the profiler."""

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = Path(os.path.realpath(os.fsdecode(arguments[0])))
            if _may_hold_answers(path):
                raise Wrong(f"An attempt cannot open {path}: it may hold an answer.")
        elif event in REFUSED:
            raise Wrong(f"An attempt cannot start another program ({event}).")
        elif (
            event in ("sys.setprofile", "sys.settrace")
            and sys._getframe(1).f_code is not running.set_profile.__code__
            and not (here.runner and here.runner.refused)
        ):
            raise Wrong(f"An attempt cannot call {event}.")

    sys.addaudithook(hook)
