"""Published tokenizers and chat templates: tokens, texts and conversations are those of transformers."""

import itertools
import json
from random import Random

import numpy as np
import pytest
from awkward_texts import BLOCKS, conversations, texts
from fetch import MODEL
from published import FOLDER, NEEDS

from xtrain.data.pieces import Cutter
from xtrain.errors import UserError
from xtrain.formats.texts import load_texts
from xtrain.server.api import Message
from xtrain.server.grammars import Grammars, Guide
from xtrain.server.tools import Tool
from xtrain.serving.text_stream import TextStream
from xtrain.serving.tool_calls import form_of
from xtrain.tuning.examples import read_examples

transformers = pytest.importorskip("transformers")
N = 2000
ENDS = {  # the token that ends an answer
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "llama2": "</s>",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    MODEL: "<|im_end|>",
}
WITH_TEMPLATE = sorted({*ENDS} - {"gptoss", "llama2"})  # whose packages have none
BYTE_FALLBACK = {"gemma3", "llama2"}  # SentencePiece; the others are byte-level
pytestmark = NEEDS


class Both:
    """A tokenizer as xtrain and as transformers load it."""

    def __init__(self, name):
        self.name = name
        self.ours = load_texts(FOLDER / name)
        self.tokenizer = self.ours.tokenizer
        load = transformers.AutoTokenizer
        if name == "llama2":
            # LlamaTokenizer of transformers 5 does not read the file's normalizer: it puts no space in front of a text that
            # begins with one, where SentencePiece and the file do
            load = transformers.PreTrainedTokenizerFast
        self.theirs = load.from_pretrained(FOLDER / name)
        added = self.theirs.added_tokens_encoder
        # Gemma has 6,000 unused tokens
        self.added = Random(0).sample(sorted(added), min(len(added), 300))

    def encode(self, texts, special):
        return self.theirs(texts, add_special_tokens=special).input_ids


@pytest.fixture(scope="module", params=sorted(ENDS))
def both(request):
    return Both(request.param)


@pytest.fixture(scope="module")
def drawn(both):
    """N texts and the tokens that transformers has for them."""
    sample = texts(N, both.added)
    return sample, both.encode(sample, False)


def first_difference(sample, ours, theirs):
    """Return the first text whose values differ, with both."""
    pairs = zip(sample, ours, theirs)
    return next(((text[:200], a[:40], b[:40]) for text, a, b in pairs if a != b), None)


def test_the_texts_have_every_script():
    sample = set("".join(texts(N, ["<s>"])))
    assert sum(not sample.isdisjoint(block) for block in BLOCKS) == len(BLOCKS) > 700


def test_tokens(both, drawn):
    sample, theirs = drawn
    assert first_difference(sample, both.tokenizer.encode_batch(sample), theirs) is None
    few = sample[:: N // 400]
    begin = both.tokenizer.begin
    # a text that begins with the token that begins a text gets no second one
    few = [text for text, ids in zip(few, both.encode(few, False)) if ids[:1] != begin[:1]]
    theirs = both.encode(few, True)
    ours = [both.tokenizer.encode_text(text) for text in few]
    assert first_difference(few, ours, theirs) is None
    ours = [both.tokenizer.encode_spans(text)[0] for text in few]
    assert first_difference(few, ours, both.encode(few, False)) is None


def test_texts_of_tokens(both, drawn):
    """Of whole texts, and of tokens in another order, most of which are not UTF-8."""
    _, ids = drawn
    random = Random(0)
    whole = [x[:600] for x in ids]
    broken = [random.sample(x, len(x)) for x in whole[::4]]
    for kept in (False, True):  # special tokens
        rows = [*whole, *broken]
        theirs = both.theirs.batch_decode(rows, skip_special_tokens=not kept)
        if kept:
            ours = [both.tokenizer.decode(x) for x in rows]
            assert first_difference(rows, ours, theirs) is None
        if both.name in BYTE_FALLBACK:
            # The library writes U+FFFD for every byte token of a run that is not all UTF-8, also for the whole characters in
            # it: a stream has passed these on already.
            kept_rows = [i for i, text in enumerate(theirs) if "\ufffd" not in text]
            assert len(kept_rows) > len(whole) / 2
            rows = [rows[i] for i in kept_rows]
            theirs = [theirs[i] for i in kept_rows]
        ours = [streamed(both.tokenizer, x, kept) for x in rows]
        if both.name == "llama2":  # whose decoder takes away the space in front of every text
            ours = [text.removeprefix(" ") for text in ours]
        assert first_difference(rows, ours, theirs) is None


def streamed(tokenizer, ids, special):
    """Return the text that a client gets token by token."""
    if special:
        return "".join(tokenizer.stream(ids))
    stream = TextStream(tokenizer)
    return "".join([stream.feed(x) for x in ids] + [stream.finish()])


def test_pieces_of_long_texts_have_the_tokens_of_the_whole(both):
    """A training text is cut into pieces that are encoded alone."""
    sample = texts(400, both.added, seed=1)
    whole = "\n".join(sample)
    cutter = Cutter(both.tokenizer.rule)
    pieces = [piece for piece, _ in cutter.add(whole, True)]
    assert len(pieces) > len(whole) / 20_000
    ours = list(itertools.chain(*both.tokenizer.encode_batch(pieces)))
    (theirs,) = both.encode([whole], False)
    assert np.array_equal(ours, theirs)


def test_the_token_that_ends_an_answer(both):
    stop = {both.tokenizer.decode([x]) for x in both.ours.chat_stop}
    assert stop == {ENDS[both.name]} == {both.theirs.eos_token}
    assert both.tokenizer.eot == ENDS[both.name]


@pytest.mark.parametrize("both", WITH_TEMPLATE, indirect=True)
@pytest.mark.parametrize("prompt", [False, True])
def test_conversations(both, prompt):
    """What a template rejects in transformers is rejected here, too, except calls without content, or with arguments in
    the other form."""
    equal = rejected = 0
    for messages, tools in conversations(50):
        options = dict(add_generation_prompt=prompt, tools=tools)
        try:
            theirs = both.theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            if tools is None:
                with pytest.raises(UserError, match="rejects this conversation"):
                    both.ours.template.render(messages, prompt)
            rejected += 1
            continue
        ours = both.ours.template.render(messages, prompt, tools)
        assert ours == theirs
        theirs = both.theirs.apply_chat_template(messages, **options).input_ids
        assert both.tokenizer.encode(ours) == theirs
        equal += 1
    assert equal >= 20 and equal + rejected == 50


@pytest.mark.parametrize("both", ["qwen3"], indirect=True)
def test_thinking_is_switched_off_as_in_transformers(both):
    talk = [{"role": "user", "content": "2+2?"}]
    texts = []
    for values in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        options = dict(tokenize=False, add_generation_prompt=True)
        texts.append(both.ours.template.render(talk, values=values))
        assert texts[-1] == both.theirs.apply_chat_template(talk, **options, **values)
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n" and texts[2] == texts[0]


@pytest.mark.parametrize("both", WITH_TEMPLATE, indirect=True)
def test_what_is_trained(both, tmp_path):
    """The answer and the token that ends it, and nothing of the template's."""
    talk = [("user", "Hi."), ("assistant", "Hello, Zoë!"), ("user", "2+2?"), ("assistant", "4.")]
    talk = [{"role": role, "content": content} for role, content in talk]
    file = tmp_path / "talk.jsonl"
    records = [{"messages": talk[:2]}, {"messages": talk}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = [x for (x,) in read_examples([file], both.tokenizer, both.ours.template)]
    end = ENDS[both.name]
    texts = [both.tokenizer.decode(x.ids[x.trained]) for x in found]
    thought = "<think>\n\n</think>\n\n" * (both.name == "qwen3")
    # the template of Qwen3 takes the empty reasoning away from an answer that another question follows
    assert texts == [f"{thought}Hello, Zoë!{end}", f"Hello, Zoë!{end}{thought}4.{end}"]


@pytest.mark.parametrize("name", sorted(ENDS))
def test_a_grammar_is_followed_to_its_end(name):
    """A document that names a special token, which stays text; spaces are where they belong."""
    pytest.importorskip("llguidance")
    texts = load_texts(FOLDER / name)
    tokenizer = texts.tokenizer
    grammars = Grammars.of(texts)
    document = {"first_name": "größe 日本語", "n": [-12.5, True, None], "end": ENDS[name]}
    guide = Guide.of_schema({"const": document})
    constraint = grammars.compiled(guide).start()
    answer = []
    while constraint.ended is None:
        row = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        constraint.masks_into([(constraint, row)])
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        answer.append(Random(len(answer)).choice(allowed.tolist()))
        assert answer[-1] not in tokenizer.special_ids
        constraint.accept(answer[-1])
    found = b"".join(tokenizer.token_bytes[token] for token in answer)
    assert json.loads(found) == document and constraint.ended == "stop"


def test_the_tools_of_qwen3():
    """Its template shows them; transformers renders the same conversation."""
    texts = load_texts(FOLDER / "qwen3")
    assert form_of(texts.template.source([])) == "hermes"
    function = {
        "name": "weather",
        "description": "Say",
        "parameters": {"type": "object", "properties": {}},
    }
    tools = [Tool.model_validate({"type": "function", "function": function}).plain()]
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
    }
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "fine", "tool_call_id": "a"},
    ]
    plain = [Message.model_validate(message).plain() for message in messages]
    # the template of Qwen3 needs a content, which a call need not have
    with_content = [{"content": ""} | message for message in plain]
    expected = transformers.AutoTokenizer.from_pretrained(FOLDER / "qwen3").apply_chat_template(
        with_content, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert texts.template.render(plain, tools=tools) == expected
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in expected
