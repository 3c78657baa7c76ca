"""The options of a command line, also in the words of other programs.

    options = parse(Options, "python -m xtrain.train", __doc__, arguments)

`tyro` makes the options from a dataclass. Before it reads them, `translated` replaces names and
values that other programs have for the same thing (--learning-rate, --batch_size, --device cuda,
1e3 for a whole number), and answers an option that does not exist with one sentence that names the
right one.
"""

import dataclasses
import difflib
import importlib
import re
import sys
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError

Options = TypeVar("Options")
OTHER_NAMES = {  # xtrain's name -> what others call it
    "lr": "learning-rate",
    "batch": "batch-size",
    "steps": "max-steps max-iters",
    "seq-len": "block-size",
    "precision": "dtype torch-dtype",
    "weights": "quantization",
    "kv-cache": "kv-cache-dtype",
    "out": "output-dir",
    "name": "run-name",
    "data": "dataset",
    "text-key": "text-column",
    "clip": "grad-clip max-grad-norm",
    "warmup": "warmup-steps",
    "weight-decay": "wd",
    "ema": "ema-decay",
    "eval-every": "eval-interval",
    "save-every": "save-steps",
    "keep": "save-total-limit",
    "layers": "n-layer num-hidden-layers",
    "heads": "n-head",
    "dim": "n-embd hidden-size",
    "hidden-dim": "intermediate-size",
    "recompute": "gradient-checkpointing",
    "model": "model-path",
    "init": "init-from from-pretrained model",
    "max-new-tokens": "max-tokens",
    "temperature": "temp",
    "top-k": "topk",
    "log": "report-to",
    "resume": "resume-from-checkpoint",
}
VALUES = {  # option -> {what others write: xtrain's word}
    "device": {"cuda": "gpu"},
    "precision": {"bfloat16": "bf16", "float32": "fp32"},
    "recompute": {"true": "block"},
    "weights": {"fp8_e4m3": "fp8"},
    "kv-cache": {"fp8_e4m3": "fp8"},
}
PATHS = ("data", "val-data")  # an unset variable of the shell must not become an empty list
ONE_PER_GPU = "start one process per GPU, such as mpirun -n 4 xtrain train"
HINTS = {  # options that xtrain does not have -> what to do
    "epochs": "a run is counted in steps of batch x seq-len tokens: use --steps",
    "num-train-epochs": "a run is counted in steps of batch x seq-len tokens: use --steps",
    "gradient-accumulation-steps": "give the sequences of one forward pass with --micro-batch, "
    "and of a step with --batch",
    "accumulate": "give the sequences of one forward pass with --micro-batch, and of a step with "
    "--batch",
    "gpus": ONE_PER_GPU,
    "num-gpus": ONE_PER_GPU,
    "nproc-per-node": ONE_PER_GPU,
    "world-size": ONE_PER_GPU,
    "ddp": ONE_PER_GPU,
    "compile": "all kernels are compiled; --graph captures the step in a CUDA graph",
    "bf16": "use --precision bf16",
    "fp8": "use --precision fp8",
    "fp16": "fp16 is not supported: use --precision bf16",
    "fp32": "use --precision fp32",
    "amp": "use --precision bf16",
    "tf32": "matrix products in fp32 are fp32: use --precision bf16 for speed",
    "cpu": "use --device cpu",
    "cuda": "use --device gpu",
    "gpu": "use --device gpu",
    "min-lr": "give it as a fraction of --lr with --min-lr-ratio",
    "lr-scheduler": "use --schedule cosine or wsd; for another see "
    "lessons/howto/change_the_model.md",
    "lr-scheduler-type": "use --schedule cosine or wsd; for another see "
    "lessons/howto/change_the_model.md",
    "num-workers": "the tokens are mapped from disk, there are no workers: leave it out",
    "config": "options are given on the command line: leave it out",
    "wandb": "use --log wandb",
    "trackio": "use --log trackio",
    "tensorboard": "use --log tensorboard",
    "dropout": "there is no dropout: leave it out",
    "tokenizer": "the model has one: leave it out",
    "vocab-size": "the model's tokenizer decides it: leave it out",
    "preset": "the model has its shape: leave it out",
    "graph": "CUDA graphs are used where they can be: leave it out",
    "stream-output": "use --stream",
    "load-in-8bit": "use --weights int8",
    "load-in-4bit": "4-bit weights are not supported: use --weights int8",
    "lora": "use xtrain finetune --lora, see lessons/howto/finetune.md",
}  # fmt: skip


def parse(
    kind: type[Options],
    prog: str,
    description: str | None = None,
    arguments: list[str] | None = None,
    default: Options | None = None,
) -> Options:
    """Return the options of a command line, an instance of the dataclass `kind`. arguments None:
    those of the program.

    Raises UserError for an option or a value with an obvious correction, SystemExit(2) for other
    mistakes, after tyro has described them, and SystemExit(0) for --help.
    """
    import tyro

    words = translated(kind, sys.argv[1:] if arguments is None else arguments)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=prog, description=description, args=words, **defaults)


def translated(kind: type, arguments: list[str]) -> list[str]:
    """Return the arguments in xtrain's words. Raises UserError for an option that does not
    exist."""
    hints = typing.get_type_hints(kind)
    types = {f.name.replace("_", "-"): hints[f.name] for f in dataclasses.fields(kind)}
    fields = [f.name.replace("_", "-") for f in dataclasses.fields(kind)]
    names = [*fields, *(f"no-{name}" for name in fields if types[name] is bool), "help"]
    translated_words: list[str] = []
    option = ""
    for i, argument in enumerate(arguments):
        if argument == "--":  # what follows are no options
            return translated_words + arguments[i:]
        match = re.fullmatch(r"--([a-zA-Z][\w-]*)(=.*)?", argument, re.DOTALL)
        if match and not match[1].startswith("tyro"):
            own_hints = getattr(kind, "HINTS", {})
            option = _known_name(match[1].replace("_", "-"), names, HINTS | own_hints)
            value = match[2] or ""
            following = arguments[i + 1 : i + 2]
            if option in PATHS and not value and (not following or following[0].startswith("--")):
                raise UserError(f"--{option} has no value: give a path, or omit the option")
            if option in PATHS and any(x.split("=")[0] == f"--{option}" for x in translated_words):
                raise UserError(f"--{option} is given twice: give all paths after the first one")
            translated_words.append(
                f"--{option}" + (value and "=" + _value(option, value[1:], types))
            )
        else:
            translated_words.append(_value(option, argument, types))
            option = ""
    return translated_words


def _known_name(name: str, known: list[str], hints: dict[str, str]) -> str:
    """Return xtrain's name of an option. Raises UserError if there is none.

    hints: what to do about options that do not exist: HINTS, and the HINTS of the options' class.
    """
    for candidate in (name, name.lower()):
        if candidate in known:
            return candidate
        for ours, others in OTHER_NAMES.items():
            if ours in known and candidate in others.split():
                return ours
    if name.lower() in hints:
        raise UserError(f"there is no option --{name}: {hints[name.lower()]}")
    words: dict[str, str] = {}
    for ours, others in OTHER_NAMES.items():
        if ours in known:
            words |= dict.fromkeys(others.split(), ours)
    near = difflib.get_close_matches(name.lower(), [*known, *words], 1, 0.6)
    hint = "--help lists all"
    if near:
        hint = f"did you mean --{words.get(near[0], near[0])}?"
    raise UserError(f"there is no option --{name}: {hint}")


def own_word(option: str, value: Any) -> str:
    """Return xtrain's word for a value of --device, --precision and others (VALUES): "gpu" for
    "cuda". Raises UserError for a GPU by number and for fp16."""
    value = str(value).removeprefix("torch.")
    value = VALUES.get(option, {}).get(value.lower(), value)
    if option == "device" and re.fullmatch(r"cuda:\d+", value):
        raise UserError(
            f"--device {value}: choose a GPU with CUDA_VISIBLE_DEVICES={value[5:]} and give "
            "--device gpu"
        )
    if option == "precision" and value.lower() in ("fp16", "float16", "half", "16-mixed"):
        raise UserError(f"--precision {value} is not supported: use bf16, or fp32")
    return value


def _value(option: str, value: str, types: dict[str, Any]) -> str:
    """Return a value of an option in xtrain's words. Raises UserError for one that xtrain has no
    word for."""
    value = own_word(option, value)
    kinds = {types.get(option), *typing.get_args(types.get(option))}
    if option == "optimizer" and value not in kinds:
        raise UserError(
            f"--optimizer {value}: use adamw or muon; for another see "
            "lessons/howto/change_the_model.md"
        )
    if int in kinds and float not in kinds:
        if re.fullmatch(r"\d+_\d[\d_]*|\d+(\.\d+)?[eE]\+?\d+", value) and _whole(value):
            return str(_whole(value))
        if re.fullmatch(r"[-+]?\d*\.\d+|\d+\.|[-+]?\d+(\.\d+)?[eE][-+]?\d+", value):
            raise UserError(f"--{option} {value}: give a whole number")
    return value


def _whole(value: str) -> int | None:
    number = float(value.replace("_", ""))
    if number < 2**53 and number == int(number):
        return int(number)
    return None


def find_function(option: str, name: str, example: str) -> Callable[..., Any]:
    """Return the function MODULE:FUNCTION that an option names; modules in the current folder are
    found, too. Raises UserError."""
    module, _, function = name.partition(":")
    if not module or not function or module.endswith(".py") or "/" in module:
        raise UserError(f"{option} {name!r} must be MODULE:FUNCTION, such as {example}")
    sys.path.insert(0, "")
    try:
        target = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        what = "there is no such module here"
        if not missing:
            what = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{option} {name}: {module} cannot be imported ({one_line(what)}): fix it, or start "
            "where it is"
        ) from None
    finally:
        sys.path.remove("")
    if not callable(target):
        raise UserError(f"{option} {name}: {module} has no function {function!r}: name another")
    return target


def name_of(function: Callable[..., Any]) -> str:
    """MODULE:FUNCTION, with which find_function finds the function in another process; "" if it
    does not."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is function
    return f"{module}:{name}" if is_found else ""


def described(error: Exception) -> str:
    """Return an error in a user's function on one line: its type, its message, and the innermost
    line that is not xtrain's."""
    own = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(own)]
    where = ""
    if theirs:
        where = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}"
    return f"{type(error).__name__} ({one_line(str(error))}){where}"


def one_line(text: str) -> str:
    """Return the beginning of a text, on one line."""
    return " ".join(text.split())[:120]
