"""List, start and check the exercises of the lessons.

    python -m xtrain.lesson list           the exercises of each lesson, which of them passed, and your file
    python -m xtrain.lesson next           the first exercise that has not passed, and what to run
    python -m xtrain.lesson start 1        copy lesson 1's exercises to my_lessons/, where you edit them
    python -m xtrain.lesson check 1        run them in the simulator and report errors; `check 1.2` runs one
    python -m xtrain.lesson hint 1.2       a hint for an exercise; `hint 1.2 2` shows the second one, which says more

In a notebook: `from xtrain import lesson`, then `lesson.check("1.1", my_kernel)`.
lessons/checks/api.py defines these names.
"""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .cli import command, command_line, print_text
from .errors import UserError

CHECKS = Path(__file__).resolve().parents[1] / "lessons" / "checks"
PACKAGE = "lesson_checks"  # the folder's name as a package; "checks" is too common a name


def load_checks(module: str) -> Any:
    """Return a module of lessons/checks. Raises UserError in an installed package, which has no
    lessons."""
    if PACKAGE not in sys.modules:
        if not CHECKS.is_dir():
            raise UserError(
                "the lessons are in xtrain's repository, not in the installed package: run this in "
                "a clone"
            )
        spec = importlib.util.spec_from_file_location(
            PACKAGE, CHECKS / "__init__.py", submodule_search_locations=[str(CHECKS)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")


def __getattr__(name: str) -> Any:
    """Return lesson.check, lesson.source, ...: the names in lessons/checks/api.py."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(load_checks("api"), name)


@command("xtrain.lesson")
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return 0: all exercises pass; 1: some do not yet; 2: bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m xtrain.lesson",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "list", help="the exercises of each lesson, which of them passed, and your file"
    )
    commands.add_parser("next", help="the first exercise that has not passed, and what to run")
    begin = commands.add_parser("start", help="copy a lesson's exercises")
    begin.add_argument("lesson", help="its number: 1")
    begin.add_argument(
        "--force", action="store_true", help="overwrite an existing file; a copy of it stays"
    )
    help_me = commands.add_parser("hint", help="show a hint for an exercise")
    help_me.add_argument("exercise", help="its number: 1.2")
    help_me.add_argument("number", nargs="?", type=int, default=1, help="which hint; default: 1")
    judge = commands.add_parser("check", help="check your solutions")
    judge.add_argument("lesson", help="its number: 1; or the number of one exercise: 1.2")
    judge.add_argument("file", nargs="?", type=Path, help="default: my_lessons/NN_name.py")
    judge.add_argument(
        "--seed",
        type=int,
        help="repeat the random case of an earlier check, which printed its seed",
    )
    options = parser.parse_args(arguments)
    checks = load_checks("api")
    if options.command == "list":
        print_text("\n".join(map(str, checks.overview())))
        return 0
    if options.command == "start":
        path = checks.start(options.lesson, force=options.force)
        print_text(f"{path}: fill the gaps, then  python -m xtrain.lesson check {options.lesson}")
        return 0
    if options.command == "next":
        print_text(_next(checks))
        return 0
    if options.command == "hint":
        print_text(_hint(checks, options.exercise, options.number))
        return 0
    return _check(checks, options)


def _next(checks: Any) -> str:
    number = checks.next_exercise()
    if number is None:
        return "All exercises have passed."
    lesson = number.split(".")[0]
    path = checks.lesson_file(lesson)
    started = (checks.work_folder() / path.name).exists()
    run = f"check {number}" if started else f"start {lesson}"
    return f"{number}, in {path.name}: python -m xtrain.lesson {run}"


def _hint(checks: Any, exercise: str, number: int) -> str:
    hints = checks.hints(exercise)
    if not 1 <= number <= len(hints):
        raise UserError(f"there is no hint {number} for {exercise}: it has {len(hints)}")
    return f"Hint {number} of {len(hints)} for {exercise}:\n{hints[number - 1]}"


def _check(checks: Any, options: argparse.Namespace) -> int:
    """Print each verdict when it is there, and then save it."""
    results: dict[str, bool] = {}
    for number, verdict in checks.check_file(options.lesson, options.file, options.seed):
        print_text(str(verdict))
        sys.stdout.flush()
        results[number] = verdict.passed
    try:
        checks.note_passed(checks.work_folder(), results)
    except UserError as error:
        print(f"The verdict is not saved: {error}", file=sys.stderr)
    if all(results.values()):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(command_line(main))
