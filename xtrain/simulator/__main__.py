"""`python -m simulate_cuda script.py arguments`: run a script, its Numba CUDA kernels in the
simulator.

-m NAME                        run a module instead
--allow KINDS, --enable KINDS  do not report these kinds of findings (separated by commas);
                               report these, which are off by default
"""

import os
import runpy
import sys
import traceback

USAGE = "usage: python -m {} [--allow KINDS] [--enable KINDS] [-m MODULE | SCRIPT] [ARGUMENTS]"


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 for a mistake in a kernel, 2 for a wrong command line."""
    kinds: dict[str, list[str]] = {"--allow": [], "--enable": []}
    while len(arguments) > 1 and arguments[0] in kinds:
        kinds[arguments[0]] += arguments[1].split(",")
        arguments = arguments[2:]
    module = arguments[:1] == ["-m"]
    arguments = arguments[module:]
    if not arguments or arguments[0].startswith("-"):
        print(USAGE.format(__package__), file=sys.stderr)
        return 2
    if not module and not os.path.exists(arguments[0]):
        print(
            f"{arguments[0]} does not exist: name a Python script, or -m and a module",
            file=sys.stderr,
        )
        return 2
    from .errors import KernelError, reported_kinds

    try:
        reported_kinds(kinds["--allow"], kinds["--enable"])
        from .host import simulate
    except (RuntimeError, ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2

    sys.argv = arguments
    try:
        with simulate(kinds["--allow"], kinds["--enable"]):
            if module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
                runpy.run_path(arguments[0], run_name="__main__")
    except KernelError as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = os.path.dirname(os.path.abspath(__file__))
        shown = [
            f
            for f in frames
            if os.path.dirname(f.filename) != own and not f.filename.startswith("<frozen")
        ]
        print("".join(traceback.format_list(shown)), file=sys.stderr, end="")
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
