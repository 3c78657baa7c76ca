"""The published files of HellaSwag, ARC, MMLU and GSM8K, with the prompts of EleutherAI's lm-eval
(lm_eval/tasks).

    HellaSwag    Zellers et al. 2019, hellaswag_val.jsonl: activity_label, ctx_a, ctx_b, endings, label
    ARC          Clark et al. 2018, ARC-Easy-Test.jsonl: question {stem, choices}, answerKey;
                 on the Hugging Face Hub: question, choices {text, label}, answerKey
    MMLU         Hendrycks et al. 2021, anatomy_test.csv: question, four choices, a letter, without a header;
                 on the Hub: question, subject, choices, answer
    GSM8K        Cobbe et al. 2021, test.jsonl: question, answer, which ends in "#### 42"

A line that is not valid is a UserError that names the line and the field.
"""

import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from .tasks import (
    Choice,
    Item,
    Kind,
    Question,
    Record,
    read_choice,
    read_cloze,
    read_question,
)

LETTERS = "ABCD"
GSM8K_STOP = ("Question:", "</s>", "<|im_end|>")
GSM8K_ANSWER = r"#### (\-?[0-9\.\,]+)"
GSM8K_FLEXIBLE = r"-?[$0-9.,]{2,}|-?[0-9]+"
GSM8K_IGNORE = (",", r"\$", r"\.$")


def read_hellaswag(r: Record) -> Item:
    """Read an item of HellaSwag. Which ending follows? The prompt is the activity and the two parts
    of the context."""
    context = r.text("ctx_a") + " " + r.text("ctx_b", "").capitalize()
    endings = r.texts("endings")
    if r.fields.get("label") == "":
        raise UserError(
            f"{r.where} has no label: the test part of HellaSwag has none, use the validation part"
        )
    return Choice(
        where=r.where,
        prompt=_without_brackets(r.text("activity_label") + ": " + context),
        choices=tuple(r.check_text(_without_brackets(x), "an ending") for x in endings),
        answer=r.index("label", len(endings)),
    )


def _without_brackets(text: str) -> str:
    """Remove WikiHow's markup, such as [title], as lm-eval does it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def read_arc(r: Record) -> Item:
    """Read a question of ARC. The choices are the texts, not their labels."""
    question = r.fields.get("question")
    choices = r.fields.get("choices")
    if isinstance(question, dict):  # as published by AI2
        listed = question.get("choices")
        question = question.get("stem")
        rows = []
        if isinstance(listed, list):
            rows = listed
        if not all(isinstance(row, dict) for row in rows):
            raise UserError(f'{r.where}: each of "choices" must have a text and a label: fix it')
        choices = {name: [row.get(name) for row in rows] for name in ("text", "label")}
    columns: dict[str, Any] = choices if isinstance(choices, dict) else {}
    texts = r.texts("choices", columns.get("text", []))
    labels = columns.get("label")
    key = r.text("answerKey")
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise UserError(f"{r.where} needs as many labels as choices: fix or remove the line")
    if key not in labels:
        raise UserError(
            f'{r.where}: "answerKey" is {key!r}, which is no label of a choice: fix or remove the line'
        )
    if question is None:
        raise UserError(f'{r.where} has no text in "question": add it, or remove the line')
    stem = r.check_text(question, '"question"')
    return Choice(
        where=r.where,
        prompt=f"Question: {stem}\nAnswer:",
        choices=texts,
        answer=labels.index(key),
    )


def read_mmlu(r: Record) -> Item:
    """Read a question of MMLU. The choices are in the prompt; their letters are scored."""
    if "choices" in r.fields:
        choices = r.texts("choices", least=4)
        answer = r.index("answer", 4)
        subject = r.text("subject")
    else:
        choices = tuple(r.text(letter) for letter in LETTERS)
        letter = r.text("answer")
        if letter not in LETTERS or len(letter) != 1:
            raise UserError(f"{r.where}: the answer is {letter!r}: it must be A, B, C or D")
        answer = LETTERS.index(letter)
        subject = re.sub("_(test|val|dev)$", "", r.path.stem)
    if len(choices) != 4:
        raise UserError(f"{r.where} has {len(choices)} choices: a question of MMLU has four")
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices)]
    about = subject.replace("_", " ")
    return Choice(
        where=r.where,
        description=f"The following are multiple choice questions (with answers) about {about}.\n\n",
        prompt="\n".join([r.text("question").strip(), *lines, "Answer:"]),
        choices=tuple(LETTERS),
        answer=answer,
    )


def _mmlu_examples(path: Path) -> list[Path]:
    name = re.sub("_(test|val)$", "_dev", path.stem) + path.suffix
    return [path.with_name(name), path.parent.parent / "dev" / name]


def read_gsm8k(r: Record) -> Item:
    """Read a question of GSM8K. The answer is what follows #### in the generated text, and for the
    second metric its last number; commas, $ and a last point do not count."""
    answer = r.text("answer")
    if not re.search(GSM8K_ANSWER, answer):
        raise UserError(f'{r.where}: the answer has no "#### NUMBER" at its end: add it')
    return Question(
        where=r.where,
        prompt=f"Question: {r.text('question')}\nAnswer:",
        answer=answer,
        stop=GSM8K_STOP,
        extract=GSM8K_ANSWER,
        flexible=GSM8K_FLEXIBLE,
        ignore=GSM8K_IGNORE,
        ignore_case=True,
    )


# Looked up in this order: fields of a later one may be a part of those of an earlier one.
KINDS = {
    "hellaswag": Kind(frozenset({"ctx_a", "endings"}), read_hellaswag),
    "arc": Kind(frozenset({"question", "answerKey"}), read_arc),
    "mmlu": Kind(frozenset({"question", "subject", "choices"}), read_mmlu, _mmlu_examples),
    "gsm8k": Kind(
        frozenset({"question", "answer"}), read_gsm8k, lambda path: [path.with_name("train.jsonl")]
    ),
    "choice": Kind(frozenset({"prompt", "choices"}), read_choice),
    "cloze": Kind(frozenset({"prompt", "continuation"}), read_cloze),
    "question": Kind(frozenset({"prompt", "answer"}), read_question),
    "chat": Kind(frozenset({"messages", "answer"}), read_question),
}
