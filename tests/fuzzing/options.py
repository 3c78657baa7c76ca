"""Command lines with any options and values; and the options of training alone, which is faster."""

import contextlib
import dataclasses
import io
import typing

from hypothesis import strategies as st

from xtrain import (
    chat,
    compare,
    ddp,
    doctor,
    generate,
    gradcheck,
    lesson,
    profile,
    train,
)
from xtrain.config import ModelConfig, TrainConfig, resolve
from xtrain.errors import UserError
from xtrain.inspect.profile import model_config
from xtrain.report import __main__ as report
from xtrain.training.preemption import parse_seconds

from .drive import Refused, Target
from .files import refusing

WORDS = (
    "", "0", "1", "-1", "2", "7", "1e-3", "1e400", "nan", "-inf", "0x10", "1_000", "99999999999999999999", "true", "None",
    "auto", "tiny", "dim384", "cpu", "gpu", "fp32", "bf16", "none", "block", "a,b", "1,4,8", "1:2:3", "90:00", "-", "--", "---",
    "=", "--=", "-h=", "@file", "~", "*", "[bold]", "[/]", "{", "}", "%s", "%(prog)s", "\\", "'", '"', "\n", "\x00", "\x1b[31m",
    "é", "世界", "\ud800", "a" * 3000, "../..", "/nowhere", "/dev/null",
)  # fmt: skip


def only_options(config, parallel=None):
    """Everything that training does with its options before it reads a text."""
    resolve(config, gpu=False)
    parse_seconds(config.time_limit)


def known_op(op):
    if op not in gradcheck.CASES:
        raise UserError(f"there is no op {op!r}")
    return {}, ""


# name: (main, its options, replacement of the work behind it: (module, names, stand-in))
LINES = {
    "train": (train.main, TrainConfig, (train, ("run_command",), only_options)),
    "ddp": (ddp.main, TrainConfig, (train, ("run_command",), only_options)),
    "generate": (generate.main, generate.Options, None),
    "chat": (chat.main, chat.Options, None),
    "profile": (profile.main, profile.Options, (profile, ("profile",), model_config)),
    "report": (report.main, report.Options, None),
    "compare": (compare.main, compare.CompareConfig, None),
    "gradcheck": (gradcheck.main, None, (gradcheck, ("run",), known_op)),
    "lesson": (lesson.main, None, None),
    "doctor": (doctor.main, None, (doctor, ("examine",), list)),
}  # fmt: skip


def names_of(options) -> list[str]:
    names = (
        [] if options is None else [f.name.replace("_", "-") for f in dataclasses.fields(options)]
    )
    return [
        "--help",
        "-h",
        "--x",
        "list",
        "start",
        "check",
        *(f"--{n}" for n in names),
        *(f"--no-{n}" for n in names),
    ]


def arguments() -> Target:
    """main(arguments) returns 0, 1 or 2 and prints no traceback."""

    def call(value, folder):
        line, words = value
        main, options, replaced = LINES[line]
        names = names_of(options)
        given = [WORDS[i % len(WORDS)] if i % 2 else names[i // 2 % len(names)] for i in words]
        said = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
            stack.enter_context(contextlib.chdir(folder))
            if replaced is not None:
                module, names, stand_in = replaced
                for name in names:
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, stand_in)
            try:
                code = main(given)
            except SystemExit as stop:
                code = stop.code or 0
        text = said.getvalue()
        assert code in (0, 1, 2), code
        assert "Traceback" not in text, text
        if code:
            assert text.strip(), "an error without a message"
            raise Refused(text.splitlines()[0])

    lists = st.lists(st.integers(0, 2000), max_size=6)
    return Target(st.tuples(st.sampled_from(list(LINES)), lists), call)


def train_options() -> Target:
    """Any values of the right types for the options of training."""
    whole = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63, 10**30]))
    real = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, 1e-300]))
    text = st.one_of(st.sampled_from(WORDS), st.text(max_size=5))
    kinds = {int: whole, float: real, str: text, bool: st.booleans()}
    values = {}
    hints = typing.get_type_hints(TrainConfig)
    for name, kind in (
        (field.name, hints[field.name]) for field in dataclasses.fields(TrainConfig)
    ):
        args = typing.get_args(kind)
        plain = [a for a in (args or (kind,)) if a in kinds]
        if plain:
            values[name] = st.one_of(
                *(kinds[a] for a in plain), *([st.none()] if type(None) in args else [])
            )
    optional = st.fixed_dictionaries({}, optional=values)
    return Target(optional, refusing(lambda v, folder: only_options(TrainConfig(**v))))


def model_shapes() -> Target:
    """ModelConfig.from_dict with values of any type."""
    fields = [f.name for f in dataclasses.fields(ModelConfig)]
    number = st.one_of(
        st.integers(-2, 300),
        st.sampled_from([2**31, 2**62, 10**30]),
        st.floats(),
        st.text(max_size=3),
    )
    value = st.one_of(number, st.none(), st.booleans(), st.dictionaries(st.sampled_from(
        ["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    ), st.one_of(number, st.sampled_from(["linear", "dynamic", "llama3"]), st.lists(number, max_size=1))))  # fmt: skip
    needed = {n: value for n in ("vocab_size", "dim", "n_layers", "n_heads")}
    needed = {n: st.one_of(st.integers(1, 64), v) for n, v in needed.items()}
    other = {n: st.one_of(st.none(), value) for n in fields if n not in needed}

    def call(v, folder):
        config = ModelConfig.from_dict(v)
        assert config.context >= 1 and config.padded_vocab_size >= config.vocab_size
        assert ModelConfig.from_dict(config.to_dict()) == config

    return Target(st.fixed_dictionaries(needed, optional=other), refusing(call))


TARGETS = {"arguments": arguments, "train_options": train_options, "model_shapes": model_shapes}
