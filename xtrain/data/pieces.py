"""Where a text may be cut so that the tokens of the pieces are those of the whole text.

A tokenizer normalizes a text, its pre-tokenizer splits the result into words, and BPE merges within
a word. So a cut changes no token if no word, and no match of the pre-tokenizer, depends on both
sides. `rule` knows three such places, for tokenizers whose every part it knows:

    x| y     before a space after a visible character
    x\\n|y    after a single line break, before a letter
    x|。     between a letter and an ideographic punctuation mark

**Regular expressions** (GPT-2, GPT-4, o200k, Llama 3, Qwen, DeepSeek): a word is letters, digits or
punctuation with at most one character in front (never a line break), or it is white space, so no
word spans any of these places. Their only lookaround, `\\s+(?!\\S)`, reads one character after
white space: the white space at x| y is all on the right, and a single line break is one word either way.
**NFC** neither composes nor reorders across a space, a line break, or these punctuation marks.
**SentencePiece** (Llama 2, Mistral, Gemma) writes a space as U+2581. There x| y is a place if the
pre-tokenizer splits at it, or if no token within reach holds U+2581 after another character (Gemma
3 has one such token): then no merge joins the two. If U+2581 is put in front of every text, it
replaces the space of the piece.
A tokenizer that puts a space in front of a text that has none may only be cut before a space.
**Added tokens** are found in the text first and may take white space with them: no place is within
their reach.

A text without such a place in LONGEST characters, or of another tokenizer, is cut there all the
same, after a line or before a space where possible. Only then may tokens next to the cut differ
from those of the whole text; the bytes never do. A shorter document of another tokenizer is not
cut.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 1 << 13  # characters of a piece, if the text allows: one is encoded by one core
FEW = 100  # tokens of a vocabulary that join words: a search for more would take long
LONGEST = 1 << 18  # characters of a piece at most: bounds the memory
SPACE = "▁"  # SentencePiece

BEFORE_SPACE = rf"(?<=[^\s{SPACE}])(?= [\s\S])"
AFTER_LINE = r"(?<=\S\n)(?=[^\W\d_])"
BEFORE_PUNCTUATION = r"(?<=[A-Za-zぁ-ゖァ-ヺ一-龥가-힣])(?=[。，、！？；：])"
ONLY_SPACES = re.compile(BEFORE_SPACE)
ALL_PLACES = re.compile(f"{BEFORE_SPACE}|{AFTER_LINE}|{BEFORE_PUNCTUATION}")

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# regular expressions of Split that make a boundary at ALL_PLACES
BOUNDARY = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{n}|{_TAIL}" for n in (r"\p{N}", r"\p{N}{1,3}")),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# those that make none there, and match the same on both sides of it
NEUTRAL = {r"\p{N}{1,3}", r"\p{N}", "[一-龥\u3040-ゟ゠-ヿ]+"}


@dataclass(frozen=True)
class Rule:
    """Where texts of one tokenizer may be cut.

    places: None if nowhere.
    drops_space: the space at the cut is left out of the second piece, because the tokenizer puts
    one in front.
    added: the added tokens, and those that join words.
    reach: characters on both sides of a cut that must hold none of them.
    """

    places: re.Pattern[str] | None = None
    drops_space: bool = False
    added: re.Pattern[str] | None = None
    reach: int = 0
    normalize: Callable[[str], str] = str

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Return the first cut in start..end, None if there is none.

        text must continue for at least reach + 2 characters after `end`, unless the document ends.
        """
        while self.places is not None and (place := self.places.search(text, start, end + 2)):
            cut = place.start()
            if self._is_clear(text[max(0, cut - self.reach) : cut + self.reach]):
                return cut
            start = cut + 1
        return None

    def _is_clear(self, around: str) -> bool:
        return self.added is None or not (
            self.added.search(around) or self.added.search(self.normalize(around))
        )


def rule(spec: dict[str, Any], normalize: Callable[[str], str]) -> Rule:
    """Return the rule for a tokenizer.

    spec: its tokenizer.json
    normalize: its normalizer
    """
    model = spec["model"]
    normalizers = _steps(spec["normalizer"])
    splitters = _steps(spec["pre_tokenizer"])
    kinds = [step["type"] for step in normalizers]
    replaces = [s for s in normalizers if s["type"] == "Replace" and _is_space_to_sentencepiece(s)]
    known_normalizers = all(
        step["type"] == "NFC"
        or (step["type"] == "Prepend" and step["prepend"] == SPACE)
        or step in replaces
        for step in normalizers
    ) and kinds in ([], ["NFC"], ["Replace"], ["Prepend", "Replace"])
    if model["type"] != "BPE" or model.get("dropout") or not known_normalizers:
        return Rule()
    if replaces:  # no space is left to split at
        splitters = [
            s for s in splitters if (s["type"], s.get("pattern")) != ("Split", {"String": " "})
        ]
    roles = [_role(step) for step in splitters]
    sentencepiece = bool(replaces) or any(step["type"] == "Metaspace" for step in splitters)
    if None in roles or (replaces and splitters):
        return Rule()
    joined: list[str] = []
    if "boundary" not in roles:
        joined = _tokens_that_join_words(model)
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if not sentencepiece or affixes or SPACE not in model["vocab"] or len(joined) > FEW:
            return Rule()
    spaces_only = sentencepiece or any(step.get("add_prefix_space") for step in splitters)
    tokens = [token["content"] for token in spec["added_tokens"] if token["content"]]
    tokens += [normalized for token in tokens if (normalized := normalize(token))] + joined
    reach = max(map(len, tokens), default=0) + 1
    if reach > PIECE:
        return Rule()
    return Rule(
        places=ONLY_SPACES if spaces_only else ALL_PLACES,
        drops_space="Prepend" in kinds,
        added=re.compile("|".join(map(re.escape, sorted(set(tokens))))) if tokens else None,
        reach=reach,
        normalize=normalize,
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, Sequences resolved."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [step for each in inner for step in _steps(each)]


def _is_space_to_sentencepiece(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": " "} and step["content"] == SPACE


def _role(step: dict[str, Any]) -> str | None:
    """Return what a step does to cuts: "boundary", "neutral" or None.

    "boundary": the pre-tokenizer splits at every place; "neutral": a cut there changes nothing for
    it; None: unknown.
    """
    kind = step["type"]
    if kind == "ByteLevel":
        if step.get("use_regex", True):
            return "boundary"
        return "neutral"
    if kind == "Digits":
        return "neutral"
    if kind == "Metaspace" and step["replacement"] == SPACE:
        if step.get("split", True):
            return "boundary"
        return "neutral"
    if kind == "Split" and (step["behavior"], step["invert"]) in (
        ("Isolated", False),
        ("Removed", True),  # keeps the matches
    ):
        # DeepSeek's file has line breaks in place of their escape sequences
        pattern = str(step["pattern"].get("Regex"))
        pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
        if pattern in BOUNDARY:
            return "boundary"
        if pattern in NEUTRAL and step["behavior"] == "Isolated":
            return "neutral"
        return None
    return None


def _tokens_that_join_words(model: dict[str, Any]) -> list[str]:
    """Return the tokens that hold U+2581 after another character.

    BPE, whose results are tokens, joins two words only where such a token is in the text.
    """
    joined = re.compile(f"[^{SPACE}]{SPACE}")
    return list(filter(joined.search, model["vocab"]))


def chunks(text: str, limit: int) -> Iterator[str]:
    """Cut text into chunks of at most `limit` characters, after a line or before a space if
    possible.
    """
    start = 0
    while len(text) - start > limit:
        end = start + limit
        cut = text.rfind("\n", start, end) + 1 or text.rfind(" ", start + 1, end)
        end = cut if cut > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


class Cutter:
    """Cuts one document after another, of any length, given part by part."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self._text = ""  # of the document, not yet cut
        self._searched = PIECE  # no cut up to here

    def add(self, text: str, ends: bool) -> Iterator[tuple[str, bool]]:
        """Yield (piece, True if it ends its document).

        text: the next part of a document
        ends: True if it is the last one
        """
        self._text += text
        while len(self._text) > PIECE:
            margin = 0
            if not ends:
                margin = self.rule.reach + 2
            end = min(len(self._text) - margin, LONGEST)
            cut = self.rule.next_cut(self._text, self._searched, end)
            if cut is None and len(self._text) <= LONGEST + margin:
                self._searched = max(PIECE, end)
                break
            drop = self.rule.drops_space and cut is not None
            if cut is None:
                cut = len(next(chunks(self._text, LONGEST)))
            yield self._text[:cut], False
            self._text = self._text[cut + drop :]
            self._searched = PIECE
        if ends:
            yield self._text, True
            self._text = ""
            self._searched = PIECE
