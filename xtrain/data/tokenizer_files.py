"""The files next to a tokenizer.json: names of its special tokens, add_prefix_space, chat templates.

    tokenizer_config.json        names of special tokens, chat_template, ...
    special_tokens_map.json      these names in older folders
    chat_template.jinja          the chat template
    additional_chat_templates/   more of them, such as tool_use.jinja

All of it is read as transformers reads it.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..errors import UserError
from ..json_files import listed, parse_json, read_json_if_present

MODEL_CONFIG = "config.json"
CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
MAX_SOURCE = 1 << 20  # bytes of a template
Files = dict[str, bytes]  # {name: content}
# transformers' classes that take a tokenizer.json as it is
GENERAL_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend")
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
SENTENCEPIECE_DECODERS = (
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def read_companions(folder: Path) -> Files:
    """Return the files next to a tokenizer.json. Raises OSError."""
    paths = [folder / name for name in (CONFIG, SPECIAL_MAP, TEMPLATE)]
    paths += sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return {x.relative_to(folder).as_posix(): x.read_bytes() for x in paths if x.is_file()}


def config_of(companions: Files, folder: Path = Path()) -> dict[str, Any]:
    """Return tokenizer_config.json, in older folders with the names of special_tokens_map.json.

    folder: for messages. Raises UserError for damaged JSON.
    """
    config, names = (
        parse_json(companions.get(name, b"{}"), folder / name) for name in (CONFIG, SPECIAL_MAP)
    )
    if "added_tokens_decoder" in config:
        return config
    return config | names


# ----------------------------------------------------------------------------- special tokens
def token_text(entry: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, also if an object holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    if isinstance(entry, str):
        return entry
    return None


def special_names(config: dict[str, Any]) -> list[str]:
    """Return the texts of the tokens that tokenizer_config.json calls special."""
    entries = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key)
        if isinstance(more, dict):
            more = list(more.values())
        if isinstance(more, list):
            entries += more
    return [text for text in map(token_text, entries) if text]


def add_named_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], names: Iterable[str]
) -> None:
    """Make the tokens that tokenizer_config.json names one token each wherever a text has them.

    tokenizer.json may have such a token in its vocabulary only, or call it no special token.

    names: of special tokens; those that the vocabulary lacks are left out.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    lacking = lambda text: text not in added and backend.token_to_id(text) is not None
    plain = [token for token in _added_tokens(config) if lacking(token.content)]
    if plain:
        backend.add_tokens(plain)
        added |= {token.content: token for token in plain}
    special = []
    for text in dict.fromkeys(names):
        if lacking(text):
            special.append(AddedToken(text, special=True, normalized=False))
        elif text in added and not added[text].special:
            added[text].special = True
            special.append(added[text])
    if special:
        backend.add_special_tokens(special)


def check_added_tokens(config: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Raise UserError if tokenizer_config.json adds a token that tokenizer.json would split."""
    texts = [token.content for token in _added_tokens(config)]
    lacking = [text for text in texts if text and backend.token_to_id(text) is None]
    if lacking:
        raise UserError(
            f"it lacks tokens that {CONFIG} adds ({listed(lacking)}): write both files again with "
            "transformers.AutoTokenizer."
            "from_pretrained(folder).save_pretrained(folder), or remove them from "
            "added_tokens_decoder if the model lacks them too"
        )


def without_rows(
    backend: tokenizers.Tokenizer, companions: Files, vocab_size: int
) -> tuple[tokenizers.Tokenizer, Files]:
    """Return a tokenizer and its companions without the added tokens that a model has no row for.

    A text model of Gemma 3 has none for <image_soft_token>, and many have none for a token of
    padding that was added to their tokenizer.
    """
    if all(i < vocab_size for i in backend.get_added_tokens_decoder()):
        return backend, companions
    content = json.loads(backend.to_str())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["id"] < vocab_size]
    config = parse_json(companions.get(CONFIG, b"{}"), Path(CONFIG))
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        known = {i: x for i, x in entries.items() if not (i.isdigit() and int(i) >= vocab_size)}
        text = json.dumps(config | {"added_tokens_decoder": known}, indent=2, ensure_ascii=False)
        companions = companions | {CONFIG: text.encode()}
    return tokenizers.Tokenizer.from_str(json.dumps(content)), companions


def rows_of(folder: Path) -> int | None:
    """Return the vocab_size of the model in a folder, None without one."""
    with contextlib.suppress(UserError):  # what is wrong with it, its model's reader says
        size = read_json_if_present(folder / MODEL_CONFIG).get("vocab_size")
        if type(size) is int and size > 0:
            return size
    return None


def _added_tokens(config: dict[str, Any]) -> list[AddedToken]:
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return []
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        AddedToken(text, **{name: entry[name] for name in flags if type(entry.get(name)) is bool})
        for entry in entries.values()
        if isinstance(entry, dict) and (text := token_text(entry))
    ]


# ----------------------------------------------------------------------------- add_prefix_space
def with_prefix_space(text: bytes, config: dict[str, Any]) -> bytes:
    """Return a tokenizer.json with the space in front of a text that add_prefix_space says.

    As in transformers: its general class ignores this key of tokenizer_config.json. The classes of
    byte-level tokenizers follow it, and without it put none there. Llama's follows it if it is
    true or false, and ignores it in a byte-level tokenizer. (Without the key, transformers 5 makes
    Llama's first step anew; here it is that of tokenizer.json, as in SentencePiece.)
    """
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    wanted = config.get("add_prefix_space")
    if kind in GENERAL_CLASSES:
        return text
    content = json.loads(text)
    steps = [content["pre_tokenizer"]]
    if steps[0] and steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    byte_level = [step for step in steps if step and step["type"] == "ByteLevel"]
    if kind != "LlamaTokenizer":
        for step in byte_level:
            step["add_prefix_space"] = bool(wanted)
    elif type(wanted) is bool and not byte_level and wanted != _puts_space(content, steps):
        scheme = "never"
        if wanted:
            scheme = "always" if config.get("legacy") else "first"
        content["normalizer"] = None
        content["pre_tokenizer"] = METASPACE | {"prepend_scheme": scheme}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        content["decoder"] = {
            "type": "Sequence",
            "decoders": [*SENTENCEPIECE_DECODERS, *([strip] if wanted else [])],
        }
    return json.dumps(content).encode()


def _puts_space(content: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Return True if a SentencePiece tokenizer puts a space in front of a text."""
    schemes = [s.get("prepend_scheme", "always") for s in steps if s and s["type"] == "Metaspace"]
    return {*schemes} - {"never"} != set() or '"Prepend"' in json.dumps(content["normalizer"])


# ----------------------------------------------------------------------------- chat templates
def template_sources(companions: Files, folder: Path = Path()) -> dict[str, str]:
    """Return the chat templates, {name: Jinja source}; {} if there is none.

    "default" is the one of conversations without tools. If there are template files, those in
    tokenizer_config.json do not count. folder: for messages. Raises UserError.
    """
    sources = {}
    for name, content in companions.items():
        if not name.endswith(".jinja"):
            continue
        if len(content) > MAX_SOURCE:
            raise UserError(f"{folder / name} is longer than {MAX_SOURCE >> 20} MB")
        key = "default" if name == TEMPLATE else Path(name).stem
        sources[key] = content.decode(errors="replace")
    if sources:
        return sources
    entry = config_of(companions, folder).get("chat_template")
    if entry is None:
        return {}
    named: dict[Any, Any] = {"default": entry}
    if isinstance(entry, list):
        named = {x.get("name"): x.get("template") for x in entry if isinstance(x, dict)}
    if not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise UserError(
            f"{folder / CONFIG}: chat_template must be a text or a list of objects with name and "
            "template: correct it"
        )
    return named
