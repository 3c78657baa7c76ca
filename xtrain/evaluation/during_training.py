"""A run's model evaluated on files of test items while it trains: --eval-tasks.

The numbers are those of `xtrain evaluate` on the checkpoint of that step, in the same precision.
Each evaluation makes an engine: the KV cache of an earlier one belongs to the weights of then.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..cli import say
from ..errors import UserError
from ..formats.huggingface import as_ids
from ..training.run import Run


def evaluation(run: Run) -> Callable[[], Iterator[dict[str, float]]]:
    """Read and check the files of --eval-tasks. Return a function that evaluates the model.

    The function evaluates the model as it is when it is called, one task after the other, and
    yields {"FILE/METRIC": value} for each. A generated answer has at most 256 tokens, and at most
    half of the model's context. Raises UserError.
    """
    # here, because a run without --eval-tasks starts sooner without them
    from ..formats.texts import texts_of
    from ..serving.pretrained import Pretrained
    from .run import Options, TaskExams, read_tasks

    c = run.config
    config = run.model.config
    new = min(Options.max_new_tokens, max(1, config.context // 2))
    o = Options(model="", tasks=c.eval_tasks, limit=c.eval_items, max_new_tokens=new)
    stop = as_ids(run.model.special_tokens.get("eos_token_id"))
    texts = texts_of(Path(), run.corpus.tokenizer, stop)
    pretrained = Pretrained(texts.folder, texts.tokenizer, texts.stop, texts.template, run.model)
    exams = TaskExams(pretrained, read_tasks(o), o)
    names = names_of(c.eval_tasks)

    def evaluate() -> Iterator[dict[str, float]]:
        try:
            for name, result in zip(names, exams.results()):
                yield {f"{name}/{metric}": x.value for metric, x in result.metrics.items()}
        except UserError as error:  # training continues
            say(f"the evaluation on {', '.join(c.eval_tasks)} failed: {error}")

    return evaluate


def names_of(files: Sequence[str]) -> list[str]:
    """Short names of files: without folder and ending, if no two are then the same."""
    short = [Path(file).stem for file in files]
    if len({*short}) == len(short):
        return short
    return list(files)
