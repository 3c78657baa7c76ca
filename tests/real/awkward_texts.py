"""Texts and conversations that are hard to tokenize, drawn with a seed."""

import json
import unicodedata
from itertools import cycle
from random import Random

# Every character of Unicode's White_Space, and the invisible ones that are not white space.
WHITE = [chr(i) for i in range(0x3001) if chr(i).isspace()] + list("\u200b\u200d\u2060\ufeff\u180e")
# fmt: off
WORDS = [
    "def", "return", "class", "for", "if", "None", "x", "i", "n", "self", "print", "lambda", "0", "1", "10", "3.14", "0x1F", "1e-9",
    '"a"', "'b'", 'f"{x}"', *"()[]{},.:;=%&|^~!?@#$\\/*+-<>", "==", "!=", "<=", "->", "+=", "**", "//", "/*", "*/", "<!--", "-->",
    "<div>", "</div>", "&&", "||", "::", "...", "__init__", "snake_case", "camelCase", "HTTPServer", "don't", "I'LL", "it's", "größe",
    "naïve", "你好", "世界", "。", "、", "か", "한국어", "привет", "мир", "½", "²", "Ⅷ", "٣", "1234567", "ﬁ", "ǆ", "İ", "ß",
]
EMOJI = ["😀", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "❤\ufe0f", "1\ufe0f\u20e3", "\U0001faf8"]
INDENTS = ["", " ", "    ", "\t", "\t\t ", " " * 13, " " * 90]
LONG = ["a", "ab", "=-", " ", "你", "9", "\n", "x y", "ä"]
# fmt: on


def blocks():
    """Return the assigned characters of every run of 128 code points that has some: letters of every script, signs, numbers."""
    found = []
    for start in range(0, 0x110000, 128):
        characters = [chr(i) for i in range(start, start + 128)]
        # unassigned; half a surrogate pair; private use
        assigned = [x for x in characters if unicodedata.category(x) not in ("Cn", "Cs", "Co")]
        if assigned:
            found.append(assigned)
    return found


BLOCKS = blocks()


def texts(n, added, seed=0):
    """Return n texts. added: tokens that some of them contain. Those about scripts, six of ten, have all blocks in
    turn."""
    random = Random(seed)
    pick = lambda items, low, high: random.choices(items, k=random.randint(low, high))
    next_block = cycle(BLOCKS)
    kinds = [code, bytes_and_emoji, special_tokens, white_space]
    drawn = []
    for i in range(n):
        if i % 10 < 6:
            drawn.append(words_of(next(next_block), random, pick))
        else:
            drawn.append(kinds[i % 10 - 6](added, random, pick))
    # very long lines, in place of some of these
    longer = lambda part: (part * 20_000)[: random.randint(5_000, 20_000)]
    drawn[9::250] = [longer(part) for part, _ in zip(cycle(LONG), drawn[9::250])]
    return drawn


def words_of(letters, random, pick):
    """Return words of these letters, and once more, composed or decomposed."""
    words = [
        "".join(pick(letters, 1, 9)) + random.choice(["", " ", " ", "  ", "\n"]) for _ in range(7)
    ]
    text = "".join(words)
    return text + unicodedata.normalize(random.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)


def code(added, random, pick):
    lines = []
    for _ in range(random.randint(1, 12)):
        lines.append(random.choice(INDENTS) + random.choice(["", " "]).join(pick(WORDS, 0, 14)))
    return random.choice(["\n", "\r\n", "\n\n"]).join(lines)


def bytes_and_emoji(added, random, pick):
    """Return bytes that are not UTF-8, as a reader of files gives them, and emoji, some cut."""
    noise = bytes(random.randrange(256) for _ in range(random.randint(1, 60)))
    whole = " ".join(pick(EMOJI, 1, 6)).encode()
    cut = whole[random.randrange(4) : random.randint(4, len(whole))]
    return (noise + cut).decode("utf-8", "replace") + random.choice(EMOJI)


def special_tokens(added, random, pick):
    """Return special tokens, whole and damaged, with and without white space around them."""
    parts = []
    for token in pick(added, 1, 6):
        changed = [token[1:], token[:-1], token.upper(), token * 2, f" {token} ", f"\n{token}\n"]
        parts += [random.choice(WORDS + WHITE), random.choice([token, *changed])]
    return "".join(parts)


def white_space(added, random, pick):
    """Return white space of all kinds before, between and after words."""
    parts = [random.choice(WHITE) * random.choice([1, 1, 2, 3, 7, 40]) for _ in range(8)]
    return "".join(part + random.choice(["", *WORDS]) for part in parts)


# ----------------------------------------------------------------------------- conversations
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Say what the weather is like <now> & 'here'. Größe: \"x\"",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    }
]  # fmt: skip


def conversations(n, seed=0):
    """Return n pairs (messages, tools): with and without a system message, tools, their calls and answers, and thinking; one
    or several turns; also such that begin with the assistant, end with the user, or have two turns of a role."""
    random = Random(seed)
    sample = texts(100, ["<think>", "</think>", "<|im_end|>"], seed)
    content = lambda: random.choice(sample)
    drawn = []
    for i in range(n):
        messages = []
        if i % 3 == 0:
            messages.append({"role": "system", "content": content()})
        if i % 10 == 9:
            messages.append({"role": "assistant", "content": content()})
        tools = TOOLS if i % 5 == 2 else None
        for turn in range(random.randint(1, 4)):
            messages.append({"role": "user", "content": content()})
            if tools and turn == 0:
                called = {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}
                if i % 2:
                    called["arguments"] = json.dumps(called["arguments"])
                call = {"type": "function", "id": "call_1", "function": called}
                said = random.choice([None, "", content()])
                messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
                messages.append({"role": "tool", "content": content(), "tool_call_id": "call_1"})
            answer = {"role": "assistant", "content": content()}
            if i % 4 == 1:
                answer["reasoning_content"] = content()
            elif i % 4 == 3:
                answer["content"] = f"<think>\n{content()}\n</think>\n\n{answer['content']}"
            messages.append(answer)
        if i % 7 == 5:
            messages.append({"role": "user", "content": content()})
        drawn.append((messages, tools))
    return drawn
