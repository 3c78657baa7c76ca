"""Which tokens begin, end and are special in a text: as in transformers, and the same wherever a text becomes tokens."""

import asyncio
import json
import shutil
import sys
import types

import gguf
import httpx
import pytest
import transformers
from runs import write_lines
from serving import CHATML, TOKENIZER, make_parrot, sentencepiece_tokenizer, tokenizer_folder
from tokenizers import AddedToken
from twins import random_model, small

from xtrain import Engine
from xtrain.data.chat_template import ChatTemplate
from xtrain.data.tokenizer import END_OF_TEXT, Tokenizer
from xtrain.errors import UserError
from xtrain.evaluation.scorer import Scorer
from xtrain.formats.gguf_file import write as write_gguf
from xtrain.formats.texts import end_of_turn, load_texts
from xtrain.reinforcement.prompts import read_prompts
from xtrain.reinforcement.reinforce import ReinforceConfig, prepare
from xtrain.server.app import create_app
from xtrain.serving.conversation import Conversation
from xtrain.serving.pretrained import load
from xtrain.serving.text_stream import TextStream
from xtrain.training.single_process import SingleProcess
from xtrain.tuning.examples import read_examples
from xtrain.tuning.finetune import FinetuneConfig, read_conversations

PLAIN = [
    AddedToken(name, special=False, normalized=False) for name in ("<|im_start|>", "<|im_end|>")
]
SPECIAL = [AddedToken(name, special=True) for name in ("<s>", "</s>")]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDERS = {
    "eos is text in tokenizer.json": dict(added=PLAIN, eos_token="<|im_end|>"),
    "eos is only in the vocabulary": dict(vocabulary=["<|im_end|>"], eos_token="<|im_end|>"),
    "it is an object": dict(vocabulary=["<|im_end|>"], eos_token={"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "__type": "AddedToken"}),
    "another special token": dict(vocabulary=["<|im_end|>"], added=PLAIN[:1], eos_token=END_OF_TEXT, additional_special_tokens=["<|im_end|>", "<|im_start|>"]),
    "a custom name": dict(vocabulary=["<|im_end|>"], eos_token=END_OF_TEXT, end_of_turn_token="<|im_end|>"),
    "added_tokens_decoder": dict(vocabulary=["<|im_end|>"], eos_token=END_OF_TEXT, added_tokens_decoder={
        "300": {"content": "<|im_end|>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": False}}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_named_tokens_are_those_of_transformers(tmp_path, name):
    folder = tokenizer_folder(tmp_path / "a", **FOLDERS[name])
    text = f"def f<|im_end|> x<|im_start|>return<|im_end|>{END_OF_TEXT}"
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ours.encode_batch([text])[0] == ids
    assert theirs.convert_tokens_to_ids("<|im_end|>") in ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    stream, plain = TextStream(ours), [i for i in ids if i not in theirs.all_special_ids]
    assert stream.feed(*ids) + stream.finish() == theirs.decode(plain, skip_special_tokens=True)
    ours.save(tmp_path / "b")
    again = Tokenizer.load(tmp_path / "b")
    assert (again.encode(text), again.special_ids) == (ids, ours.special_ids)


AROUND = ["<s> $A", "<s> $A </s>", "$A </s>", "$A"]


def test_added_tokens_that_the_model_lacks_are_text(tmp_path):
    """Gemma 3's text models have no row for <image_soft_token>, which their tokenizer has."""
    image = {"content": "<image>", "special": True}
    names = dict(eos_token=END_OF_TEXT, image_token="<image>")
    n = TOKENIZER.vocab_size
    names["added_tokens_decoder"] = {str(n): image}
    added = [AddedToken("<image>", special=True)]
    folder = tokenizer_folder(tmp_path / "a", added=added, **names)
    assert Tokenizer.load(folder).encode("<image>") == [n]
    random_model(small(vocab_size=n)).save_pretrained(tmp_path / "model")
    assert Tokenizer.load(folder, tmp_path / "model").vocab_size == n
    shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True)
    loaded = load(folder, "cpu")
    ids = loaded.tokenizer.encode("x<image> y")
    assert max(ids) < n and ids == TOKENIZER.encode("x<image> y")
    Engine(loaded.model, 1).generate([ids], 3)
    loaded.model.save_pretrained(tmp_path / "b", loaded.tokenizer)
    (tmp_path / "b/config.json").unlink()  # as in a cache of tokens
    again = Tokenizer.load(tmp_path / "b")
    assert again.vocab_size == n and again.sha256 == loaded.tokenizer.sha256
    # a token of the vocabulary is part of other tokens' merges: such a tokenizer is another model's
    tokenizer_folder(folder, vocabulary=["ab"], **names | {"added_tokens_decoder": {}})
    with pytest.raises(UserError, match=rf"the tokenizer has {n + 1} tokens, the model only {n}"):
        load(folder, "cpu")


@pytest.mark.parametrize("around", AROUND)
def test_tokens_around_a_text(tmp_path, around):
    folder = tokenizer_folder(tmp_path, added=SPECIAL, around=around, **NAMES)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    bos, eos = ours.bos_token_id, ours.eos_token_id
    assert ours.begin == [bos] * ("<s>" in around) and ours.end == [eos] * ("</s>" in around)
    for text in ("def f", "", "größe 日"):
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ours.encode_prompt(text, add_special_tokens=False) == plain
        assert ours.encode_text(text) == theirs(text)["input_ids"]
        assert ours.encode_prompt(text) == ours.begin + plain
    begun = [bos, *ours.encode("def f")]
    assert ours.encode("<s>def f") == ours.encode_prompt("<s>def f") == begun
    assert ours.encode_text("<s>def f</s>") == [*begun, eos]


def test_a_tokenizer_as_llama_2_has_it(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece_tokenizer()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMES))
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode_prompt("def f") == ours.encode_text("def f") == theirs("def f")["input_ids"]
    assert ours.encode_prompt("<s>def f") == theirs("<s>def f", add_special_tokens=False).input_ids


@pytest.mark.parametrize("around", AROUND)
def test_training_and_serving_have_the_same_tokens(tmp_path, around):
    """A prompt that something follows never ends, and never begins twice; neither does an answer end twice."""
    folder = tokenizer_folder(tmp_path / "model", added=SPECIAL, around=around, **NAMES)
    texts = load_texts(make_parrot(folder, [5, 6]))
    scorer = Scorer(load(folder, "cpu"), 64)
    bos = texts.tokenizer.begin
    eos = texts.tokenizer.eos_token_id
    for prompt in ("def f", "<s>def f"):
        pairs = [{"prompt": prompt, "completion": "(x)" + end} for end in ("", "</s>")]
        data = write_lines(tmp_path / "pairs.jsonl", *pairs)
        whole = write_lines(tmp_path / "texts.jsonl", {"text": prompt}, {"text": prompt + "</s>"})
        served = texts.tokenizer.encode_prompt(prompt)
        assert served == scorer.encode(prompt)
        assert served in (bos + TOKENIZER.encode("def f"), texts.tokenizer.encode("<s>def f"))
        answer = [*TOKENIZER.encode("(x)"), eos]
        for (x,) in read_examples([data], texts.tokenizer, None):
            assert x.prompt.tolist() == served and x.ids.tolist() == served + answer
        for (x,) in read_examples([whole], texts.tokenizer, None):
            assert x.ids.tolist() == [*served, eos] and x.trained.sum() == len(served)
        for x in read_prompts([data], texts.tokenizer, None):
            assert x.ids == served


# ----------------------------------------------------------------------------- the end of an answer
LLAMA_2 = "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
ENDS = {
    "eos": dict(added=PLAIN, eos_token="<|im_end|>"),
    "only in the template": dict(added=PLAIN, eos_token=END_OF_TEXT),
    "in generation_config.json": dict(added=PLAIN, eos_token=END_OF_TEXT),
}  # fmt: skip


@pytest.fixture(params=ENDS)
def parrot(request, tmp_path):
    """A model that answers "fine<|im_end|>" and then goes on, in a folder that calls <|im_end|> text."""
    folder = tokenizer_folder(tmp_path / "parrot", template=CHATML, **ENDS[request.param])
    tokenizer = Tokenizer.load(folder)
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    last = tokenizer.encode("<|im_start|>assistant\n")[-1]
    make_parrot(folder, [last, *tokenizer.encode("fine"), *end, *tokenizer.encode("return x")])
    if request.param == "in generation_config.json":
        eos = {"eos_token_id": [tokenizer.eos_token_id, *end]}
        (folder / "generation_config.json").write_text(json.dumps(eos))
    return folder


def test_the_end_of_a_turn_is_special_although_tokenizer_json_calls_it_text(parrot):
    texts = load_texts(parrot)
    (end,) = texts.tokenizer.encode("<|im_end|>")
    (start,) = texts.tokenizer.encode("<|im_start|>")
    assert end in texts.chat_stop and end in texts.tokenizer.special_ids
    assert start not in texts.tokenizer.special_ids, "it neither begins nor ends a text"
    named = json.loads((parrot / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    generation = (parrot / "generation_config.json").is_file()
    assert (end in texts.stop) == (end in texts.answer_stop) == (named or generation)


def test_a_conversation_has_each_end_once(parrot):
    p = load(parrot, "cpu")
    talk = Conversation(p, Engine(p.model, 1))
    for _ in range(2):
        assert "".join(talk.reply("def f", max_new_tokens=9)) == "fine"
        assert talk.completion.reason == "stop"
    messages = [*talk.messages, {"role": "user", "content": "x"}]
    _, tokens = talk._rendered(messages, "x")
    theirs = transformers.AutoTokenizer.from_pretrained(parrot)
    want = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens == want and p.tokenizer.decode(tokens).count("<|im_end|>") == 5


def test_the_server_and_evaluate_answer_without_it(parrot):
    p = load(parrot, "cpu")
    app = create_app(Engine(p.model, 2, 64), p)
    options = {"temperature": 0, "max_tokens": 9}
    messages = [{"role": "user", "content": "def f"}]
    prompt = "<|im_start|>assistant\n"

    async def answers():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1/")
        async with app.router.lifespan_context(app), http:
            chat = await http.post("chat/completions", json={"messages": messages} | options)
            text = await http.post("completions", json={"prompt": prompt} | options)
        return chat.json()["choices"][0], text.json()["choices"][0]

    chat, text = asyncio.run(answers())
    assert (chat["message"]["content"], chat["finish_reason"]) == ("fine", "stop")
    ids = p.tokenizer.encode_prompt(prompt)
    (evaluated,) = Scorer(p, 64).generate([ids], 9, ["no such text"])
    assert evaluated == text["text"] and "<|im_end|>" not in evaluated
    stops = p.tokenizer.encode("<|im_end|>")[0] in p.stop
    assert evaluated == "fine" if stops else evaluated.startswith("finereturn")


def test_fine_tuning_learns_the_end_of_a_turn(parrot, tmp_path):
    talk = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "fine"}]
    data = write_lines(tmp_path / "x.jsonl", *[{"messages": talk}] * 3)
    corpus = read_conversations(FinetuneConfig(data=(data,)), parrot, 64)
    x = corpus.train[0]
    assert corpus.tokenizer.decode(x.ids[x.trained]) == "fine<|im_end|>"
    assert corpus.stop == set(corpus.tokenizer.encode("<|im_end|>"))


def test_a_rollout_ends_with_the_turn(parrot, tmp_path, monkeypatch):
    reward = types.SimpleNamespace(reward=lambda record, completions: [0.0] * len(completions))
    monkeypatch.setitem(sys.modules, "a_task", reward)
    texts = load_texts(parrot)
    talk = [{"role": "user", "content": "def f"}]
    for record, want in (({"messages": talk}, texts.chat_stop), ({"prompt": "x"}, texts.answer_stop)):  # fmt: skip
        data = write_lines(tmp_path / "x.jsonl", *[record] * 2)
        config = ReinforceConfig(init=str(parrot), data=(data,), task="a_task:reward", group=2, batch=2)  # fmt: skip
        assert prepare(config, SingleProcess())[1].stop == want


def test_gguf_has_it_as_a_control_token(parrot, tmp_path):
    write_gguf(parrot, tmp_path / "a.gguf", "f16")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    value = lambda key: reader.get_field(f"tokenizer.ggml.{key}").contents()
    tokens, types = value("tokens"), value("token_type")
    assert types[tokens.index("<|im_end|>")] == gguf.TokenType.CONTROL
    assert types[tokens.index("<|im_start|>")] == gguf.TokenType.USER_DEFINED
    eot = reader.get_field("tokenizer.ggml.eot_token_id")
    ends = {value("eos_token_id"), *([eot.contents()] if eot else [])}
    assert tokens.index("<|im_end|>") in ends


@pytest.mark.parametrize("template, token", [
    (CHATML, "<|im_end|>"),
    (LLAMA_2, "</s>"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    ("{{ raise_exception('no') }}", None),
    ("{% if %}", None),
    ("nothing", None),
])  # fmt: skip
def test_the_token_that_ends_a_turn(tmp_path, template, token):
    folder = tokenizer_folder(tmp_path, added=[*PLAIN, *SPECIAL], eos_token=END_OF_TEXT)
    tokenizer = Tokenizer.load(folder)
    want = set() if token is None else {tokenizer.encode(token)[0]}
    assert end_of_turn(ChatTemplate(template, {}), tokenizer) == want
    assert end_of_turn(None, tokenizer) == set()
