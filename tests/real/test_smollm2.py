"""SmolLM2-135M-Instruct, a published model: what xtrain computes, says and serves is what transformers computes and says."""

import contextlib
import threading
from typing import Literal

import numpy as np
import pydantic
import pytest
from awkward_texts import texts
from published import NEEDS, SMOLLM2, SYSTEM, answers, prompt

from xtrain import Engine
from xtrain.evaluation.run import Options, evaluate
from xtrain.export import main as export
from xtrain.inspect.compare import compare, first_divergence, load_transformers
from xtrain.serving.pretrained import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = NEEDS

QUESTIONS = ["What is the capital of France?", "Count from 1 to 5.", "Was ist zwei plus drei?"]
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she
had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and what is the use of a book,”
thought Alice “without pictures or conversations?”
"""


@pytest.fixture(scope="module")
def ours():
    return load(SMOLLM2, "cpu")


@pytest.fixture(scope="module")
def engine(ours):
    return Engine(ours.model, 4, 256)


@pytest.fixture(scope="module")
def theirs():
    return load_transformers(SMOLLM2)


def log_softmax(theirs, ids):
    """Return transformers' log-probabilities (len(ids), V)."""
    with torch.no_grad():
        return torch.log_softmax(theirs(torch.tensor([ids])).logits[0], -1).numpy()


def test_every_stage(ours, theirs):
    ids = np.array([ours.tokenizer.encode(TEXT)[:32]])
    differences = compare(ours.model, theirs, ids)
    assert len(differences) > 60 and first_divergence(differences, 1e-4) is None


def test_greedy_answers(ours, engine, theirs):
    found = answers(ours, engine, QUESTIONS)
    for question, answer in zip(QUESTIONS, found):
        ids = torch.tensor([prompt(ours, question)])
        whole = theirs.generate(ids, max_new_tokens=20, do_sample=False)
        assert list(answer) == whole[0, ids.shape[1] :].tolist()
    assert ours.tokenizer.decode(found[0]) == "The capital of France is Paris.<|im_end|>"


def test_log_probabilities(ours, engine, theirs):
    ids = ours.tokenizer.encode(TEXT)
    (scores,) = engine.logprobs([ids], top=5)
    expected = log_softmax(theirs, ids)[:-1]
    np.testing.assert_allclose(scores.logprobs, expected[range(len(ids) - 1), ids[1:]], atol=2e-3)
    for row, top in zip(expected, scores.top):
        best = np.sort(row)[-5:][::-1]
        np.testing.assert_allclose([x for _, x in top], best, atol=2e-3)
        np.testing.assert_allclose([row[i] for i, _ in top], best, atol=2e-3)


def test_perplexity(ours, theirs, tmp_path):
    """In windows of 48 tokens, each of whose last 24 count."""
    (tmp_path / "alice.txt").write_text(TEXT, encoding="utf-8")
    options = Options(model="", tasks=(str(tmp_path / "alice.txt"),), context=48, stride=24)
    (result,) = evaluate(options, ours)
    ids = ours.tokenizer.encode(TEXT)
    nats = []
    for start in range(0, len(ids), 24):
        window = ids[start : start + 48]
        logprobs = log_softmax(theirs, window)
        first = 24 if start else 1
        nats += [-logprobs[i - 1, window[i]] for i in range(first, len(window))]
        if start + 48 >= len(ids):
            break
    assert result.n == len(nats) == len(ids) - 1
    perplexity = result.metrics["perplexity"].value
    assert perplexity == pytest.approx(np.exp(np.mean(nats)), rel=1e-3) and perplexity < 50


@pytest.mark.parametrize("kind, most", [("int8", 0.1), ("int4", 0.8), ("nf4", 0.9)])
def test_quantized_weights(engine, ours, kind, most):
    """A byte per weight: nearly the same probabilities. Four bits: others, and still the answer."""
    ids = ours.tokenizer.encode(TEXT)
    (full,) = engine.logprobs([ids])
    whole = load(SMOLLM2, "cpu")
    small = Engine(whole.model, 4, 256, weights=kind)
    (codes,) = small.logprobs([ids])
    assert 0.01 < abs(codes.logprobs - full.logprobs).mean() < most
    (answer,) = answers(whole, small, QUESTIONS[:1])
    assert "Paris" in whole.tokenizer.decode(answer)


def test_gguf(ours, theirs, tmp_path):
    """Written by xtrain, read by transformers."""
    path = tmp_path / "smollm2.gguf"
    assert export(["--model", str(SMOLLM2), "--gguf", str(path), "--type", "q8_0"]) == 0
    assert path.stat().st_size < 150e6
    named = dict(gguf_file=path.name, local_files_only=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **named)
    ids = ours.tokenizer.encode(TEXT)[:32]
    a, b = log_softmax(read.eval(), ids), log_softmax(theirs, ids)
    chosen = (range(31), ids[1:])
    assert 0 < abs(a[:-1][chosen] - b[:-1][chosen]).mean() < 0.05
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, **named)
    sample = texts(200, ["<|im_start|>", "<|im_end|>"])
    encoded = tokenizer(sample, add_special_tokens=False).input_ids
    assert ours.tokenizer.encode_batch(sample) == encoded
    talk = [{"role": "user", "content": "a"}]
    expected = ours.template.render(talk)
    assert (
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == expected
    )
    assert tokenizer.eos_token_id == read.generation_config.eos_token_id == 2


@contextlib.contextmanager
def served(pretrained, engine):
    """Yield a client of OpenAI's library for a server in a thread."""
    openai = pytest.importorskip("openai")
    uvicorn = pytest.importorskip("uvicorn")
    from xtrain.server.app import Limits, create_app

    app = create_app(engine, pretrained, "smollm2", None, Limits())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)


def test_streams_of_the_server(ours, engine):
    """Of a conversation, and of a text, with the log-probabilities of the engine."""
    (expected,) = answers(ours, engine, QUESTIONS[:1])
    with served(ours, engine) as client:
        options = dict(model="smollm2", temperature=0, stream=True, max_tokens=20)
        talk = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
        chunks = list(client.chat.completions.create(messages=talk, logprobs=True, **options))
        said = [chunk.choices[0] for chunk in chunks if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in said)
        assert text == "The capital of France is Paris." and said[-1].finish_reason == "stop"
        tokens = [x for choice in said if choice.logprobs for x in choice.logprobs.content or ()]
        ids = prompt(ours, QUESTIONS[0])
        (scores,) = engine.logprobs([ids], [list(expected)])
        found = [x.logprob for x in tokens]
        np.testing.assert_allclose(found, scores.logprobs[: len(found)], atol=2e-3)
        assert len(found) >= len(expected) - 1
        chunks = list(client.completions.create(prompt="One, two, three,", **options))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text.startswith(" four, five, six,")


def test_a_schema_holds(ours, engine):
    """The model chooses the words, the grammar the form; the grammar's tokens are those that the tokenizer makes."""
    pytest.importorskip("llguidance")

    class City(pydantic.BaseModel):
        capital: str = pydantic.Field(max_length=20)
        country: Literal["Italy", "France"]

    with served(ours, engine) as client:
        talk = [SYSTEM, {"role": "user", "content": QUESTIONS[0] + " Answer as JSON."}]
        answer = client.chat.completions.parse(
            model="smollm2", messages=talk, response_format=City, temperature=0
        )
    city = answer.choices[0].message.parsed
    assert (city.capital, city.country) == ("Paris", "France")
