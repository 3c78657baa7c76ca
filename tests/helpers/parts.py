"""Documents as a list of texts, and as the parts that xtrain.data.documents deals in."""


def whole(parts) -> list[str]:
    """The documents whose parts these are. The last one must be complete."""
    found, begun = [""], False
    for text, ends, *_ in parts:
        found[-1] += text
        begun = not ends
        if ends:
            found.append("")
    assert not begun and found.pop() == ""
    return found


def in_parts(texts, n=10**9):
    """Parts of at most n characters, as Documents yields them."""
    for text in texts:
        starts = range(0, len(text), n)
        yield from ((text[i : i + n], i + n >= len(text)) for i in starts)
