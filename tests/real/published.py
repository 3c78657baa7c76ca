"""Where the published tokenizers and the published model are, and the marks of tests that need them."""

import pytest
from fetch import MODEL, TOKENIZERS, default_folder

FOLDER = default_folder()
SMOLLM2 = FOLDER / MODEL
NEEDS = [
    pytest.mark.real,
    pytest.mark.skipif(
        not all((FOLDER / name).exists() for name in (*TOKENIZERS, MODEL)),
        reason=f"needs published tokenizers and a model in {FOLDER}: python tests/real/fetch.py",
    ),
]
SYSTEM = {"role": "system", "content": "Be brief."}


def prompt(texts, question):
    """Return the tokens of a question to SmolLM2, up to its answer. texts: what load or load_texts returns."""
    talk = [SYSTEM, {"role": "user", "content": question}]
    return texts.tokenizer.encode(texts.template.render(talk))


def answers(texts, engine, questions, n=20):
    """Return the most likely answers, of at most n tokens, with the tokens that end them."""
    ids = [prompt(texts, question) for question in questions]
    return engine.generate(ids, n, stop=texts.chat_stop)
