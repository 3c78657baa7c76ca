"""python -m xtrain.chat: templates rendered as in transformers, turns that compute only new tokens, a full context."""

import io
import json

import pytest
import torch
import transformers
from serving import chat_tokenizer, sentencepiece_tokenizer
from twins import random_model, small

from xtrain import Engine, UserError
from xtrain.chat import main
from xtrain.data.chat_template import ChatTemplate
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats.manifest import verify, write_manifest
from xtrain.serving import pretrained
from xtrain.serving.conversation import ContextFull, Conversation

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + "
        "message['content'] | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama 3": (
        "{{- bos_token }}\n{%- set day = strftime_now('%Y') %}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message['role'] + '|' + day + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}\n"
        "{%- endfor %}\n"
        "{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n\\n' }}\n{%- endif %}\n"
    ),
    "blocks": (
        "{% for m in messages %}\n"
        "  {% if m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}\n"
        "  {{ m | tojson }}{{ namespace(x=1).x }}{{ m.content.split('</think>')[-1].lstrip('\\n') }}\n"
        "{% endfor %}\n"
    ),
}  # fmt: skip
TALK = [
    {"role": "system", "content": 'Be <b>brief</b> & "kind".'},
    {"role": "user", "content": " größe? 日本語 "},
    {"role": "assistant", "content": "x = 1\n<think>hm</think>\n\nyes"},
    {"role": "user", "content": "again"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer("def f(x):\n    return x + größe\n")


@pytest.fixture
def folder(tokenizer, tmp_path):
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=128, head_dim=16)
    random_model(config, device="cpu").save_pretrained(tmp_path, tokenizer)
    return tmp_path


def set_template(folder, template):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


# ----------------------------------------------------------------------------- templates
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("source_of", ["config", "file", "list"])
def test_templates_render_as_in_transformers(folder, name, source_of):
    source = TEMPLATES[name]
    if source_of == "config":
        set_template(folder, source)
    elif source_of == "list":
        named = [{"name": "other", "template": "no"}, {"name": "default", "template": source}]
        set_template(folder, named)
    else:
        (folder / "chat_template.jinja").write_text(source)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.load(folder)
    for messages in (TALK, TALK[1:], TALK[1:2], TALK[:2]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.render(messages, prompt) == expected
    ids = theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert Tokenizer.load(folder).encode(ours.render(TALK)) == ids


def test_generation_blocks_are_where_transformers_finds_them(folder):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    set_template(folder, source)
    ours, theirs = ChatTemplate.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.marks_generation() and not ChatTemplate(CHATML, {}).marks_generation()
    rendered = ours.render_turns(TALK)
    want = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    ids, places = Tokenizer.load(folder).encode_spans(rendered.text)
    mask = [int(any(a < end and start < b for start, end in rendered.spans)) for a, b in places]
    assert (ids, mask) == (want["input_ids"], want["assistant_masks"]) and 0 < sum(mask) < len(mask)
    inside = "{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ 'ab' ~ f() }}"
    assert ChatTemplate(inside, {}).render_turns(TALK).spans is None


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("names", [("default", "tool_use"), ("default", "rag"), ("tool_use", "rag")])  # fmt: skip
@pytest.mark.parametrize("as_files", [False, True])
def test_of_several_templates_the_one_of_transformers(folder, tmp_path, names, as_files):
    """And all of them are saved again, as the files of a checkpoint are."""
    sources = {name: name + " {{ tools }} {{ messages[0].content }}" for name in names}
    set_template(folder, [{"name": name, "template": sources[name]} for name in names])
    if as_files:
        set_template(folder, "in the config")
        (folder / "additional_chat_templates").mkdir()
        for name in names:
            file = {"default": "chat_template"}.get(name, f"additional_chat_templates/{name}")
            (folder / f"{file}.jinja").write_text(sources[name])
    (tmp_path / "saved").mkdir()
    Tokenizer.load(folder).save(tmp_path / "saved")
    write_manifest(tmp_path / "saved", {})
    verify(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for ours in (ChatTemplate.load(folder), ChatTemplate.load(tmp_path / "saved")):
        for tools in (None, TOOLS, []):
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
            try:
                want = theirs.apply_chat_template(TALK, **options)
            except ValueError as error:
                assert "no default specified" in str(error) and "default" not in names
                with pytest.raises(UserError, match=r"templates rag, tool_use, but none named def"):
                    ours.render(TALK, tools=tools)
            else:
                assert ours.render(TALK, tools=tools) == want


def test_templates_that_fail(folder):
    assert ChatTemplate.load(folder) is None
    set_template(folder, TEMPLATES["llama 2"])
    with pytest.raises(
        UserError, match="rejects this conversation: Conversation roles must alternate"
    ):
        ChatTemplate.load(folder).render(TALK[:1] + TALK[2:])
    for source, words in (
        ("{% if %}", "cannot be read"),
        ("{{ messages.x.y }}", "rejects this conversation"),
        ("{{ 1 / 0 }}", "rejects this conversation"),
        ("\ud800", "rejects this conversation"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "rejects this conversation"),
        ("{% for i in range(10**12) %}{% endfor %}", "rejects this conversation"),
        ({"a": 1}, "must be a text or a list"),
        ("{{ '{x}'.format() }}", "rejects this conversation: KeyError 'x'"),
        ("{{ '{}'.format() }}", "rejects this conversation: IndexError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects .*: RecursionError"),
        ("{{" + "(" * 10**4 + "1" + ")" * 10**4 + "}}", "cannot be read: RecursionError"),
    ):
        set_template(folder, source)
        with pytest.raises(UserError, match=words) as caught:
            ChatTemplate.load(folder).render(TALK)
        assert "\n" not in str(caught.value)


def test_a_template_stays_in_its_sandbox():
    """A template is foreign code. In Jinja 3.1.5 the second one could read the module's names; doctor.py requires a later one."""
    for source in (
        "{{ '{0.__globals__}'.format(raise_exception) }}",
        "{% set f = '{0.__globals__}'|attr('format') %}{{ f(raise_exception) }}",
    ):
        assert ChatTemplate(source, {}).render(TALK) == ""


# ----------------------------------------------------------------------------- conversations
def conversation(folder, **options):
    p = pretrained.load(folder, "cpu")
    engine = Engine(p.model, 1, options.pop("max_seq_len", None), reuse_prefix=True)
    return Conversation(p, engine, **options)


@pytest.mark.parametrize(
    "template", [CHATML, TEMPLATES["llama 2"], None], ids=["chatml", "llama 2", "none"]
)
def test_a_turn_computes_only_new_tokens(folder, template):
    if template:
        set_template(folder, template)
    talk = conversation(folder)
    special, cached = talk.pretrained.tokenizer.special_ids, 0
    for turn in range(4):
        text = "".join(talk.reply("größe", max_new_tokens=5, temperature=1.0, seed=turn))
        answer = talk.completion
        assert talk.messages[-1] == {"role": "assistant", "content": text}
        prompt = talk.tokens[: len(talk.tokens) - len([t for t in answer if t not in special])]
        engine = Engine(talk.pretrained.model, 1)
        fresh = engine.generate([prompt], 5, temperature=1.0, seed=turn, stop=talk.stop)
        assert fresh == [answer]  # reuse changes nothing
        if template != TEMPLATES["llama 2"]:  # which trims answers
            assert answer.reused == cached
        assert answer.prefilled == len(prompt) - answer.reused
        # The last token has not been through the model; a special token is not part of the text.
        reusable = next((i for i, t in enumerate(answer) if t in special), len(answer) - 1)
        cached = len(prompt) + reusable
    if template == CHATML:
        rendered = talk.pretrained.template.render(talk.messages, add_generation_prompt=False)
        assert rendered.startswith(talk.text)


def test_a_template_that_renders_nothing_is_named(folder):
    set_template(folder, "")
    with pytest.raises(UserError, match="chat template renders nothing of this conversation"):
        "".join(conversation(folder).reply("hello"))


@pytest.mark.parametrize("template", [TEMPLATES["llama 2"], None], ids=["llama 2", "none"])
def test_a_tokenizer_that_starts_every_text_with_a_space(tmp_path, template):
    """As Llama 2's tokenizer: later turns continue a text, so no space is added in front of them."""
    content = sentencepiece_tokenizer()
    spaceless = lambda merge: "▁" not in "".join(merge)[1:]  # as in Llama 2's vocabulary
    content["model"]["merges"] = [m for m in content["model"]["merges"] if spaceless(m)]
    size = len(content["model"]["vocab"])
    random_model(small(vocab_size=size, max_seq_len=256, head_dim=16)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    more = {"chat_template": template} if template else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | more))
    theirs, talk = transformers.AutoTokenizer.from_pretrained(tmp_path), conversation(tmp_path)
    for said in ("def f", "x", "return x"):
        messages = [*talk.messages, {"role": "user", "content": said}]
        text, tokens = talk._rendered(messages, said)
        whole = theirs.apply_chat_template(messages)["input_ids"] if template else theirs(text)["input_ids"]  # fmt: skip
        assert tokens == whole
        answer = " def return"  # as if the model had generated it
        talk.messages = [*messages, {"role": "assistant", "content": answer}]
        talk.text, talk.turns = text + answer, talk.turns + 1
        talk.tokens = tokens + talk.pretrained.tokenizer.encode(answer.strip())


def test_greedy_turns_are_those_of_transformers(folder, tokenizer):
    """Three turns with the same text and tokens as the tokenizer and the model of transformers."""
    set_template(folder, CHATML)
    talk = conversation(folder, system="kind")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for said in ("größe", "x", "def f"):
        before = talk.messages + [{"role": "user", "content": said}]
        text = "".join(talk.reply(said, max_new_tokens=6))
        ids = talk.tokens[
            : len(talk.tokens) - len([t for t in talk.completion if t not in tokenizer.special_ids])
        ]
        assert tokenizer.decode(ids) == talk.pretrained.template.render(before)

        out = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert out[0, len(ids) :].tolist() == talk.completion
        assert (
            "".join(tokenizer.stream(t for t in talk.completion if t not in tokenizer.special_ids))
            == text
        )


def test_a_full_context(folder):
    set_template(folder, CHATML)
    talk = conversation(folder, max_seq_len=40)
    while True:
        before = list(talk.messages)
        try:
            list(talk.reply("größe", max_new_tokens=8))
        except ContextFull as error:
            assert "the context is full" in str(error) and "/reset" in str(error)
            assert talk.messages == before  # unchanged
            break
        assert len(talk.messages) < 20
        if talk.completion.reason == "full":
            assert len(talk.tokens) <= 40
    talk.reset()
    with pytest.raises(
        ContextFull, match=r"this text has \d\d+ tokens, the context 40.*shorten it"
    ):
        list(talk.reply("größe " * 30))  # here /reset would not help
    assert "".join(talk.reply("x", max_new_tokens=3)) and len(talk.messages) == 2


def test_an_interrupted_answer_is_kept(folder):
    set_template(folder, CHATML)
    talk = conversation(folder)
    reply = talk.reply("größe", max_new_tokens=20)
    text = next(reply) + next(reply)
    reply.close()
    assert talk.messages[-1]["content"].startswith(text)
    assert talk.engine.step() == [] and not talk.engine.scheduler.decoding
    list(talk.reply("x", max_new_tokens=3))
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


# ----------------------------------------------------------------------------- the command line
def run(monkeypatch, capsys, folder, typed, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    code = main(["--model", str(folder), "--device", "cpu", *options])
    return code, *capsys.readouterr()


def test_the_loop(folder, monkeypatch, capsys):
    set_template(folder, CHATML)
    options = ["--max-new-tokens", "6", "--temperature", "0", "--seed", "3"]
    code, out, err = run(
        monkeypatch, capsys, folder, "größe\n\nx\n/reset\ngröße\n/exit\nnever\n", *options
    )
    talk = conversation(folder)
    expected = ["".join(talk.reply(said, max_new_tokens=6)) for said in ("größe", "x")]
    assert code == 0 and out == f"{expected[0]}\n{expected[1]}\n{expected[0]}\n"
    assert "KV cache" in err and "context" not in err
    hot = [*options, "--temperature", "1"]
    first = run(monkeypatch, capsys, folder, "größe\nx\n", *hot)[:2]
    assert first == run(monkeypatch, capsys, folder, "größe\nx\n", *hot)[:2]


def test_values_of_the_template(folder, monkeypatch, capsys):
    set_template(folder, CHATML + "{% if enable_thinking is false %}<think></think>{% endif %}")
    options = ["--max-new-tokens", "6", "--temperature", "0", "--chat-template-kwargs"]
    code, out, err = run(
        monkeypatch, capsys, folder, "größe\n", *options, '{"enable_thinking": false}'
    )
    talk = conversation(folder, values={"enable_thinking": False})
    assert code == 0 and out == "".join(talk.reply("größe", max_new_tokens=6)) + "\n"
    assert talk.text.count("<think></think>") == 1
    for wrong, message in (
        ("no", """--chat-template-kwargs must be a JSON object, got no: give it as '{"enable"""),
        ('{"effort": 1}', "chat_template_kwargs 'effort': the model's chat template does not read"),
    ):
        code, out, err = run(monkeypatch, capsys, folder, "größe\n", *options, wrong)
        assert code == 2 and message in err


def test_ctrl_c_ends_the_answer_and_the_chat_continues(folder, monkeypatch, capsys):
    set_template(folder, CHATML)
    whole = Engine._step

    def interrupted(self, step):
        if step.number == 5:
            raise KeyboardInterrupt
        return whole(self, step)

    monkeypatch.setattr(Engine, "_step", interrupted)
    options = ["--max-new-tokens", "12", "--temperature", "0"]
    code, out, err = run(monkeypatch, capsys, folder, "größe\nx\n", *options)
    assert code == 0 and err.count("[interrupted]") == 1 and out.count("\n") >= 2
    monkeypatch.setattr(Engine, "_step", whole)
    plain = run(monkeypatch, capsys, folder, "größe\n", *options)[1]
    assert plain.startswith(out.split("\n")[0]) and len(out.split("\n")[0]) < len(plain)


def test_ctrl_c_at_the_prompt_does_not_end_the_chat(folder, monkeypatch, capsys):
    """In a terminal it may come just after an answer has ended, so the chat continues. Without a terminal it ends the program."""
    set_template(folder, CHATML)
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    plain = run(monkeypatch, capsys, folder, "größe\nx\n", *options)[1]

    class Typed:
        encoding, errors = "utf-8", "strict"

        def __init__(self, person):
            self.isatty = lambda: person
            self.lines = iter(["größe\n", None, "x\n", None])

        def readline(self, *_):
            line = next(self.lines, "")
            if line is None:
                raise KeyboardInterrupt
            return line

    for person, said in ((True, plain), (False, plain.split("\n")[0] + "\n")):
        monkeypatch.setattr("sys.stdin", Typed(person))
        assert main(["--model", str(folder), "--device", "cpu", *options]) == (0 if person else 130)
        out, err = capsys.readouterr()
        assert out.replace("> ", "") == said
        assert err.count("[type /exit or Ctrl-D to leave]") == (2 if person else 0)


def test_invalid_system_messages(folder, monkeypatch, capsys):
    set_template(folder, CHATML)
    code, out, err = run(monkeypatch, capsys, folder, "x\n", "--system", "\udcff")
    assert (code, out, err.count("\n")) == (2, "", 1) and "--system is not valid UTF-8" in err
    code, out, err = run(monkeypatch, capsys, folder, "x\n", "--system", "größe " * 200)
    assert code == 0 and "[--system and this text have" in err


def test_a_later_turn_that_the_template_rejects_does_not_end_the_chat(folder, monkeypatch, capsys):
    angry = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    set_template(folder, angry + CHATML)
    options = ["--max-new-tokens", "3", "--temperature", "0"]
    code, out, err = run(monkeypatch, capsys, folder, "x\nno\ny\n", *options)
    assert code == 0 and "[the model's chat template rejects this conversation: not that]" in err
    assert out == run(monkeypatch, capsys, folder, "x\ny\n", *options)[1]
    assert run(monkeypatch, capsys, folder, "no\ny\n", *options)[0] == 2  # the first turn


def test_the_notes_and_errors_of_the_loop(folder, monkeypatch, capsys):
    options = ["--max-new-tokens", "100", "--max-seq-len", "40"]
    code, out, err = run(monkeypatch, capsys, folder, "größe\nx\n", "--system", "kind", *options)
    assert code == 0 and "no chat template" in err and "--system is ignored" in err
    assert "context 40 of 128 tokens" in err
    assert "the context of 40 tokens is full: type /reset" in err and "[the context is full" in err
    for wrong in (["--max-new-tokens", "0"], ["--top-p", "2"], ["--seed", "-1"]):
        code, out, err = run(monkeypatch, capsys, folder, "", *wrong)
        assert code == 2 and err.count("\n") == 1, "reported before the user types"
    assert run(monkeypatch, capsys, folder, "x\ny\n", "--seed", str(2**63 - 1))[0] == 0
    (folder / "model.safetensors").write_bytes(b"")
    code, out, err = run(monkeypatch, capsys, folder, "x\n")
    assert code == 2 and not out and err.startswith("xtrain.chat: ") and err.count("\n") == 1
    assert run(monkeypatch, capsys, folder / "none", "x\n")[0] == 2
