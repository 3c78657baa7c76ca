"""Environments: conversations in several turns keep the bits of every log-probability, the model's tokens alone are trained."""

import json
import sys
import threading
import types

import numpy as np
import pytest
import tokenizers
import twins
from runs import SILENT, metrics
from serving import CHATML, tokenizer_folder

from xtrain import Engine, UserError, batch_invariant
from xtrain.data.chat_template import ChatTemplate
from xtrain.data.conversations import Conversation
from xtrain.data.tokenizer import Tokenizer
from xtrain.kernels.decoding.sampling import Sampling
from xtrain.reinforce import main, reinforce
from xtrain.reinforcement.calls import Limits
from xtrain.reinforcement.environment import Environment, Turns
from xtrain.reinforcement.episodes import Player
from xtrain.reinforcement.prompts import Prompt
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.serving.requests import Completion
from xtrain.tuning.rows import rows_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
HERMES = (  # calls as Qwen writes them; reasoning of earlier turns is left out
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (  # no text next to calls, and no role
    "{% for m in messages %}{% if m.tool_calls %}{{ '[TOOL_CALLS] [' + m.tool_calls[0].function | tojson + ']<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content | tojson + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
FORGETS_TOOLS = CHATML.replace("in messages", "in messages if m.role != 'tool'")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A model with a chat template, and prompts.jsonl in its folder."""
    names = ["<|im_start|>", "<|im_end|>", *(f"<|stop {i}|>" for i in range(30))]
    added = [tokenizers.AddedToken(x, special=True) for x in names]
    path = tokenizer_folder(tmp_path_factory.mktemp("chat"), added=added, template=CHATML)
    tokenizer = Tokenizer.load(path)
    config = twins.small(vocab_size=tokenizer.vocab_size, max_seq_len=160, qk_norm=False)
    twins.random_model(config, device="cpu").save_pretrained(path, tokenizer)
    asked = [[{"role": "user", "content": f"x + {n}"}] for n in range(8)]
    lines = "".join(json.dumps({"messages": x, "n": n}) + "\n" for n, x in enumerate(asked))
    (path / "prompts.jsonl").write_text(lines)
    return path


@pytest.fixture
def module(monkeypatch):
    """The user's module, in which a tool answers every turn but the fourth."""
    found = types.SimpleNamespace(reward=reward, reply=reply)
    monkeypatch.setitem(sys.modules, "a_game", found)
    return found


def reward(record, texts):
    return [len(set(text)) / 9 for text in texts]


def reply(record, messages):
    said = [x for x in messages if x["role"] == "assistant"]
    assert messages[-1] is said[-1]
    return None if len(said) == 4 else {"role": "tool", "content": f"größe = {len(said)}\n"}


# ----------------------------------------------------------------------------- between two turns
@pytest.mark.parametrize(
    "source, said, new",
    [
        (CHATML, "x = 1", [{"role": "user", "content": "return x"}]),
        (HERMES, "<think>why</think> x", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
        (HERMES, 'x\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', [{"role": "tool", "content": "2"}]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]', [{"role": "tool", "content": 'a "quote"'}]),
    ],
)  # fmt: skip
def test_the_next_turn_follows_as_the_template_writes_it(chat, source, said, new):
    """Up to the end of the turn are the model's own tokens, also where the template would change them."""
    tokenizer = Tokenizer.load(chat)
    (end,) = tokenizer.encode("<|im_end|>")
    template = ChatTemplate(source, {})
    turns = Turns(tokenizer, template, frozenset([end]))
    asked = [{"role": "user", "content": "f"}]
    prompt = Prompt("", [], {}, Conversation("", asked, TOOLS))
    message = turns.message(prompt, said)
    assert ("add" in said) == ("tool_calls" in message)
    messages = [*asked, message]
    text = tokenizer.decode(turns.following(prompt, messages, new, end))
    whole = template.render([*messages, *new], True, TOOLS)
    before = template.render(messages, False, TOOLS)
    assert whole[: -len(text)].endswith("<|im_end|>") and before.startswith(whole[: -len(text)])
    # a turn that ended at a string has no end yet
    stopped = tokenizer.decode(turns.following(prompt, messages, new, end - 1))
    assert stopped == "<|im_end|>" + text


def test_calls_are_read_and_a_template_that_forgets_is_an_error(chat):
    tokenizer = Tokenizer.load(chat)
    prompt = Prompt("", [], {}, Conversation("", [], TOOLS))
    turns = Turns(tokenizer, ChatTemplate(HERMES, {}), frozenset())
    said = 'I see\n<tool_call>\n{"name": "add", "arguments": {"x": [1, "}"]}}\n</tool_call>'
    message = turns.message(prompt, said)
    assert message["content"] == "I see\n"
    assert [x["function"] for x in message["tool_calls"]] == [{"name": "add", "arguments": {"x": [1, "}"]}}]  # fmt: skip
    assert "tool_calls" not in turns.message(prompt, said[:-20])
    turns = Turns(tokenizer, ChatTemplate(FORGETS_TOOLS, {}), frozenset())
    with pytest.raises(UserError, match="leaves out the environment's '2'"):
        turns.following(prompt, [turns.message(prompt, "x")], [{"role": "tool", "content": "2"}], 0)


# ----------------------------------------------------------------------------- the bits
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_k=17), Sampling(1.0, top_p=0.9, min_p=0.02)], ids=str
)
def test_log_probabilities_have_the_bits_of_training_over_turns(chat, sampling, module):
    """The keys and values of earlier turns come from the cache. Nothing but drawn tokens is trained."""
    texts = Tokenizer.load(chat)
    model = twins.random_model(
        twins.small(vocab_size=texts.vocab_size, max_seq_len=160, qk_norm=False), device="cpu"
    )
    (end,) = texts.encode("<|im_end|>")
    turns = Turns(texts, ChatTemplate(CHATML, {}), frozenset(range(end, texts.vocab_size)))
    engine = Engine(model, 5, 160, True, logprobs_of="sampled", block_tokens=16)
    player = Player(engine, turns, ["("], 120, 6, Environment("a_game:reply"))
    asked = [[{"role": "user", "content": f"x + {n}"}] for n in range(2)]
    prompts = [
        Prompt("", texts.encode(turns.template.render(x)), {}, Conversation("", x)) for x in asked
    ]
    seeds = lambda *numbers: sum(numbers)
    episodes = player.play(prompts, Limits(), fail, 3, seeds, logprobs=0, **vars(sampling))
    assert engine.reused_tokens > 0 and {x.turns for x in episodes} & {2, 3, 4}
    rows = [x.example() for x in episodes]
    T = max(len(x.ids) - 1 for x in rows)
    ids, targets, _ = rows_of([[x] for x in rows], T)
    with batch_invariant():
        logprobs = model.logprobs(ids, targets, None, sampling, None).data
    counted = targets != -100
    assert counted.sum() == sum(sum(x.drawn) for x in episodes)
    drawn = np.array([x.drawn_row(T) for x in episodes])
    assert np.array_equal(logprobs[counted], drawn[counted]) and not drawn[~counted].any()
    for x in episodes:
        given_text = texts.decode([t for t, own in zip(x.ids, x.drawn) if not own])
        said = sum(message["role"] == "tool" for message in x.messages)
        assert given_text.count("größe = ") == said == x.turns - 1
        assert len(x.ids) <= 120 and x.reason in ("stop", "length")
        spoken = [message["content"] for message in x.messages if message["role"] == "assistant"]
        assert not any("(" in text for text in spoken)  # what ends a turn is not part of it


def fail(error):
    raise error


# ----------------------------------------------------------------------------- runs
def config_of(folder, out, **more):
    options = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), name="run", device="cpu", task=("a_game:reward",),
        group=4, batch=8, micro_batch=4, max_new_tokens=90, steps=2, lr=1e-2, save_every=0, eval_every=2, blas_threads=1,
        environment="a_game:reply", stop_strings=("x", "e", "f"), max_turns=3,
    )  # fmt: skip
    return ReinforceConfig(**(options | more))


@pytest.mark.parametrize(
    "options", [dict(kl=0.05, updates=2, temperature=0.9, top_p=0.8), dict(lora=4)], ids=str
)
def test_the_first_ratio_of_a_run_is_one(chat, tmp_path, module, options):
    run = reinforce(config_of(chat, tmp_path, **options), SILENT)
    lines = [m for m in metrics(run) if "loss" in m]
    assert [m["ratio_error"] + m["rollout_kl"] for m in lines] == [0.0, 0.0]
    assert all(1 < m["turns"] <= 3 for m in lines)
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {x["finish"] for x in rows} >= {"turns"} and max(x["turns"] for x in rows) == 3
    for x in rows:
        assert x["completion"].count("<|im_start|>tool\ngröße = ") == x["turns"] - 1


def test_an_environment_that_fails(chat, tmp_path, module, capsys):
    """It ends the run, or its conversation has no reward."""
    module.reply = lambda record, messages: 1 / (record["n"] - 3)
    with pytest.raises(UserError, match=r"the environment a_game:reply raised ZeroDivisionError.* for .*prompts.jsonl line 4|returned -?0?[\d.]*, not a message"):  # fmt: skip
        reinforce(config_of(chat, tmp_path), SILENT)
    module.reply = lambda record, messages: 3 if record["n"] == 5 else None
    run = reinforce(config_of(chat, tmp_path, name="skip", reward_errors="skip", steps=4), SILENT)
    assert "the environment a_game:reply returned 3, not a message" in capsys.readouterr().err
    shares = {m.get("without_reward", 0.0) for m in metrics(run) if "loss" in m}
    assert shares <= {0.0, 0.5} and 0.5 in shares


def test_what_a_reply_may_not_be(module):
    prompt = Prompt("line 1", [1], {"prompt": "a", "seen": []})
    for reply in (5, ("a",), {"role": "user"}, {"role": "user", "content": None}, "\ud800"):
        module.reply = lambda record, messages, reply=reply: record["seen"].append(1) or reply
        (error,) = Environment("a_game:reply").replies([(prompt, [])], Limits())
        assert "not a message (a text, or role and content) for line 1" in str(error)
    assert prompt.fields["seen"] == []


def test_a_reply_may_change_afterwards(module):
    """A function that returns the same object again and again does not change what was said before."""
    same = {"role": "user", "content": "1"}
    module.reply = lambda record, messages: same
    asked = [(Prompt("line 1", [1], {}), [])]
    (first,) = Environment("a_game:reply").replies(asked, Limits())
    same["content"] = "2"
    assert first == [{"role": "user", "content": "1"}]
    same["lock"] = threading.Lock()
    (error,) = Environment("a_game:reply").replies(asked, Limits())
    assert "which cannot be copied, for line 1" in str(error)


def test_a_reply_that_the_template_rejects(chat, tmp_path, module):
    """The environment is named, not the data."""
    module.reply = lambda record, messages: {"role": "user", "content": "x", "name": object()}
    words = "the environment a_game:reply returned messages that cannot be appended for .*prompts.jsonl line .*: the messages must consist"  # fmt: skip
    with pytest.raises(UserError, match=words):
        reinforce(config_of(chat, tmp_path), SILENT)


def test_a_stop_string_with_a_special_token_inside(chat):
    """A text that is compared leaves special tokens out, and a text that is shown has them."""
    tokenizer = Tokenizer.load(chat)
    player = Player(None, Turns(tokenizer, None, frozenset()), ("xy",), 9)
    turn = Completion()
    turn += [*tokenizer.encode("a x"), *tokenizer.encode("<|stop 1|>"), *tokenizer.encode("y")]
    turn.reason = "stop"
    assert player._said(turn) == "a x<|stop 1|>y"


def test_what_the_command_refuses(chat, tmp_path, module, capsys):
    given = ["--init", str(chat), "--data", str(chat / "prompts.jsonl"), "--device", "cpu", "--out", str(tmp_path), "--task", "a_game:reward"]  # fmt: skip
    for arguments, words in (
        (["--environment", "a_game:gone"], "a_game has no function 'gone'"),
        (["--max-turns", "0"], "--max-turns must be at least 1"),
        (["--stop-strings", ""], "a text of --stop-strings is empty"),
        (["--reward-weights", "1", "2"], "--reward-weights must be 1 numbers"),
        (["--reward-weights", "1e308"], "--reward-weights must be 1 numbers up to 1e6"),
    ):
        assert main([*given, *arguments]) == 2, arguments
        said = capsys.readouterr().err.strip()
        assert words in said and len(said.splitlines()) == 1, said
