"""`python -m simulate_cuda script.py arguments`: run a script, its Numba CUDA kernels in the
simulator.

-m NAME                        run a module instead
--allow KINDS, --enable KINDS  do not report these kinds of findings (separated by commas);
                               report these, which are off by default
--schedules N, --seed SEED     run every launch in N orders of its blocks and warps; in the order of
                               this seed, which a finding names
"""

import contextlib
import os
import runpy
import sys
import traceback

USAGE = (
    "usage: python -m {} [--allow KINDS] [--enable KINDS] [--schedules N] [--seed SEED] "
    "[-m MODULE | SCRIPT] [ARGUMENTS]"
)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 for a mistake in a kernel, 2 for a wrong command line."""
    kinds: dict[str, list[str]] = {"--allow": [], "--enable": []}
    orders: dict[str, int] = {}
    while len(arguments) > 1 and arguments[0] in (*kinds, "--schedules", "--seed"):
        option, value, *arguments = arguments
        if option in kinds:
            kinds[option] += value.split(",")
        elif value.isdecimal():
            orders[option.removeprefix("--")] = int(value)
        else:
            print(f"{option} {value}: give a number", file=sys.stderr)
            return 2
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
    with contextlib.ExitStack() as active:
        try:
            from .host import simulate

            active.enter_context(simulate(kinds["--allow"], kinds["--enable"], **orders))
        except (RuntimeError, ImportError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        return _run(arguments, module)


def _run(arguments, module: bool) -> int:
    """Run a module or a script. Returns 1 for a mistake in a kernel."""
    from .errors import KernelError

    sys.argv = arguments
    try:
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
