"""Evaluate a model on files of test items: the command `xtrain evaluate`."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ..cli import say
from ..console import PrintableConsole
from ..data.chat_template import template_values
from ..errors import UserError
from ..formats.texts import Texts
from ..nn.quantized import quantize_weights
from ..option_fields import REPEATED
from ..serving.options import BatchInvariant, MaxBatch, SharedOptions
from ..serving.pretrained import ModelOptions, Pretrained
from ..serving.text_generation import MaxNewTokens
from ..tuning.templates import with_template
from .benchmarks import KINDS
from .exams import ChoiceExam, ClozeExam, Exam, QuestionExam, TextExam, together
from .results import Result, table, write_json
from .scorer import Scorer
from .tasks import Choice, Cloze, Item, Question, Task, read_task

LESS_MEMORY = "use a smaller --max-batch, a smaller --context, --precision bf16, or --weights int8"


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions, ModelOptions):
    """Evaluate a model on files of test items."""

    # files: a text, or .jsonl and .csv whose fields say what they are (lessons/howto/evaluate.md)
    tasks: tuple[str, ...]
    shots: int = 0  # solved examples in front of each prompt
    # the file with these examples; none: where MMLU and GSM8K have them, next to the task
    examples: str | None = None
    # ask prompts as messages of the user, in a chat template: that of the `model`, a file, or a name
    # as in xtrain finetune; without it, only records with messages are asked so
    chat_template: str | None = None
    # values that the chat template reads, as JSON, such as '{"enable_thinking": false}'
    chat_template_kwargs: str | None = None
    system: str | None = None  # the system message of conversations that have none
    limit: int | None = None  # only the first items of each file
    context: int | None = None  # tokens of a sequence, at most; none: what the model supports
    stride: int | None = None  # tokens between two windows of a text; none: half the context
    max_new_tokens: MaxNewTokens = 256
    # end a generated answer before this text, instead of the task's own; may be given several times
    stop: Annotated[list[str], REPEATED] = field(default_factory=list)
    # a regular expression that finds the answer in a generated text, instead of the task's own
    extract: str | None = None
    json: str | None = None  # write all numbers to this file
    max_batch: MaxBatch = 32
    batch_invariant: BatchInvariant = False


def evaluate(options: Options, pretrained: Pretrained | None = None) -> list[Result]:
    """Evaluate options.tasks; print a table, and write options.json. -> one Result per file

    pretrained: the model to use, instead of loading options.model.
    Raises UserError for invalid options, files or model folders, before anything is computed.
    """
    o = options
    _check(o)
    tasks = read_tasks(o)
    p = pretrained or o.load()
    quantize_weights(p.model, o.weights)
    results = evaluate_tasks(p, tasks, o)
    shown = [*results, *_pooled(results)]
    PrintableConsole(highlight=False, markup=False).print(table(shown))
    if o.json is not None:
        settings: dict[str, Any] = asdict(o) | {
            "folder": str(p.folder),
            "device": p.model.device,
            "precision": p.model.precision,
        }
        write_json(Path(o.json), settings, shown)
    return results


def evaluate_tasks(p: Pretrained, tasks: list[Task], o: Options) -> list[Result]:
    """Tokenize and check all tasks, then compute one after the other. Raises UserError."""
    results = []
    start = time.perf_counter()
    for task, result in zip(tasks, TaskExams(p, tasks, o).results()):
        results.append(result)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        say(f"{task.path}: {task.kind}, {seconds:.1f} s")
    return results


class TaskExams:
    """Tasks, tokenized and checked for one model. Raises UserError for options or items that do not
    fit it."""

    def __init__(self, p: Pretrained, tasks: list[Task], o: Options):
        supported = p.model.config.context
        if o.context is None:
            context = supported
        else:
            context = o.context
        if not 2 <= context <= supported:
            raise UserError(
                f"--context must be from 2 to {supported}, the longest sequence of the model, got "
                f"{context}"
            )
        if o.stride is None:
            stride = max(1, context // 2)
        else:
            stride = o.stride
        if not 1 <= stride <= context:
            raise UserError(f"--stride must be from 1 to the context, {context}, got {stride}")
        self.scorer = Scorer(p, context, o.max_batch, o.batch_invariant, o.kv_cache, o.speculate)
        for name in ("system", "chat_template_kwargs"):
            if getattr(o, name) is not None and not any(_is_chat(task, o) for task in tasks):
                raise UserError(
                    f"--{name.replace('_', '-')} needs records with messages, or --chat-template: "
                    "give one"
                )
        chats = _texts(p, o)
        self.exams = [_exam(task, self.scorer, stride, o, chats) for task in tasks]
        self.scorer.max_batch = min(o.max_batch, max(exam.n_sequences for exam in self.exams))

    def results(self) -> Iterator[Result]:
        """Compute one task after the other with the weights that the model has now. Raises
        UserError, see Scorer."""
        self.scorer.engine(max(exam.longest for exam in self.exams))
        try:
            for exam in self.exams:
                yield exam.result(self.scorer)
        finally:
            self.scorer.close()


def read_tasks(o: Options) -> list[Task]:
    """Return the items of o.tasks, with examples in front of them. Raises UserError."""
    return [prepared(read_task(Path(file), KINDS, o.limit), o) for file in o.tasks]


def prepared(task: Task, o: Options) -> Task:
    """Return the task with examples in front of its prompts, and with the options' stop strings.
    Raises UserError."""
    if task.kind == "text":
        return task
    changes: dict[str, Any] = {}
    if o.stop:
        changes["stop"] = tuple(o.stop)
    if o.extract is not None:
        changes |= {"extract": o.extract, "flexible": ""}
    if o.shots:
        shots = _examples(task, o)
    else:
        shots = []
    items = []
    for item in task.items:
        assert isinstance(item, Item)
        about = [x for x in shots if x.description == item.description][: o.shots]
        if len(about) < o.shots:
            raise UserError(
                f"{item.where} needs {o.shots} examples, the file of examples has {len(about)} for "
                "it: give fewer --shots"
            )
        item = item.with_examples(about)
        items.append(replace(item, **changes) if isinstance(item, Question) else item)
    return Task(task.path, task.kind, items)


def _examples(task: Task, o: Options) -> list[Item]:
    """Return all items of the file of examples."""
    if o.examples is not None:
        candidates = [Path(o.examples)]
    else:
        candidates = [p for p in KINDS[task.kind].examples(task.path) if p.is_file()]
    if not candidates:
        raise UserError(
            f"--shots {o.shots}: there are no examples for {task.path}: give --examples FILE"
        )
    if candidates[0].resolve() == task.path.resolve():
        raise UserError(
            f"{task.path} would be its own file of examples, which has the answers: give another "
            "one with --examples"
        )
    shots = read_task(candidates[0], KINDS)
    if shots.kind != task.kind:
        raise UserError(
            f"{shots.path} is a file of kind {shots.kind}, {task.path} of kind {task.kind}: give "
            "--examples of the same kind"
        )
    return [item for item in shots.items if isinstance(item, Item)]


def _texts(p: Texts, o: Options) -> Texts:
    """Return the texts with the chat template that the options choose. Raises UserError."""
    if o.chat_template not in (None, "model"):
        p = with_template(p, o.chat_template)
    values = template_values(o.chat_template_kwargs)
    if values and p.template is not None:
        return replace(p, template=p.template.with_values(values))
    return p


def _is_chat(task: Task, o: Options) -> bool:
    if task.kind == "text":
        return False
    talks = (isinstance(item, Item) and item.conversation is not None for item in task.items)
    return o.chat_template is not None or any(talks)


def _exam(task: Task, scorer: Scorer, stride: int, o: Options, texts: Texts) -> Exam:
    """Return the exam of a task. texts: with the template of chats."""
    items: list[Any] = task.items
    if task.kind == "text":
        return TextExam(task, items, scorer, stride)
    chat_stop = None
    if _is_chat(task, o):
        items = [item.asked(texts.template, o.system) for item in items]
        chat_stop = texts.chat_stop
    if isinstance(items[0], Choice):
        return ChoiceExam(task, items, scorer)
    if isinstance(items[0], Cloze):
        return ClozeExam(task, items, scorer)
    return QuestionExam(task, items, scorer, o.max_new_tokens, chat_stop)


def _pooled(results: list[Result]) -> list[Result]:
    """Return one more result for the files of MMLU, if there are several."""
    by_kind = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
    if len(by_kind["mmlu"]) < 2:
        return []
    return [together(by_kind["mmlu"])]


def _check(o: Options) -> None:
    if not o.tasks:
        raise UserError("there is nothing to evaluate: give --tasks FILE")
    least = {"shots": 0, "max_new_tokens": 1, "max_batch": 1, "limit": 1}
    for name, n in least.items():
        value = getattr(o, name)
        if value is not None and value < n:
            raise UserError(f"--{name.replace('_', '-')} must be at least {n}, got {value}")
    if "" in o.stop:
        raise UserError(
            "a --stop text is empty: give at least one character, or leave the option out"
        )
    if o.extract is not None:
        try:
            re.compile(o.extract)
        except re.error as error:
            raise UserError(
                f"--extract {o.extract!r} is not a regular expression: {error}"
            ) from None
    if o.examples is not None and not o.shots:
        raise UserError("--examples changes nothing without --shots: say how many to use")
    if o.json is not None:
        folder = Path(o.json).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(
                f"--json {o.json}: its folder does not exist or is not writable: give another one"
            )
        if Path(o.json).is_dir():
            raise UserError(f"--json {o.json} is a folder: give the name of a file")
