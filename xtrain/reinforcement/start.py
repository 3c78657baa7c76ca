"""The start of a run of reinforcement learning: its prompts, and the options that they decide."""

from dataclasses import replace
from pathlib import Path

from ..cli import say
from ..data.records import short_name
from ..errors import UserError
from ..formats.huggingface import read_config
from ..formats.saved_runs import model_folder
from ..training.single_process import SingleProcess
from ..tuning.corpus import hold_out
from ..tuning.finetune import model_source
from ..tuning.templates import chosen_texts
from .algorithms import find_algorithm
from .environment import Environment
from .options import PreparedConfig, ReinforceConfig
from .prompts import Prompt, Prompts, read_prompts
from .rewards import Task


def prepare(config: ReinforceConfig, ranks: SingleProcess) -> tuple[PreparedConfig, Prompts]:
    """Return the config with every option that the prompts decide, and the prompts with the task.

    Raises UserError, on every rank.
    """
    config.validate()
    c, folder = model_source(config, ranks)
    if c.reference and not c.resume:  # a run may get newer checkpoints while this one trains
        reference = Path(c.reference)
        c = replace(c, reference=str(ranks.on_rank_0(lambda: model_folder(reference, say))))
    c = c.with_algorithm(find_algorithm(c.algorithm))
    for name in c.tasks:  # raises UserError before anything is read
        Task(name)
    if c.environment:
        Environment(c.environment)
    if c.batch and c.batch % (c.group * ranks.world):
        factors = f"--group {c.group}"
        if ranks.world > 1:
            factors += f" x {ranks.world} ranks"
        raise UserError(f"--batch {c.batch} is not a multiple of {factors}: choose one that is")
    room = read_config(folder).max_seq_len - c.max_new_tokens
    corpus = _read(c, folder, room)
    if corpus.skipped and ranks.rank == 0:
        say(
            f"xtrain.reinforce: {corpus.skipped} prompts are longer than {room} tokens and were "
            "left out"
        )
    steps = c.steps or 200
    decided = {
        "seq_len": corpus.longest + c.max_new_tokens,
        "steps": steps,
        "batch": c.batch or 64,
        **c.intervals(steps),
    }
    return PreparedConfig(**(vars(c) | decided)), corpus


def _read(c: ReinforceConfig, folder: Path, room: int) -> Prompts:
    """Return the prompts of --data and --val-data. Raises UserError.

    folder: of the model.
    room: the tokens that a prompt may have.
    """
    texts = chosen_texts(c, folder)
    skipped = 0

    def read(files: tuple[str, ...]) -> list[Prompt]:
        nonlocal skipped
        prompts = read_prompts(files, texts.tokenizer, texts.template)
        kept = [x for x in prompts if len(x.ids) <= room]
        skipped += len(prompts) - len(kept)
        if not kept:
            raise UserError(
                f"{', '.join(files)}: no prompt leaves room for --max-new-tokens "
                f"{c.max_new_tokens} in the model's context of {room + c.max_new_tokens}: "
                "give a smaller number"
            )
        return kept

    train = read(c.data)
    if c.val_data:
        val = read(c.val_data)
    else:
        train, val = hold_out(train, c.val_share, "prompt")
    name = short_name(c.data)
    files = len(c.data) + len(c.val_data)
    stop = texts.answer_stop
    if any(x.conversation for x in (*train, *val)):
        stop = texts.chat_stop
    return Prompts(name, files, train, val, skipped, texts.tokenizer, c.group, stop, texts.template)
