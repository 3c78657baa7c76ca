"""Typical mistakes, planted in the solutions of lesson 38: (exercise, old, new, words of the answer)."""

IF = "if tuple(tokens[i : i + 2]) == tuple(pair):"
BEST = "min(pairs, key=lambda pair: (-pairs[pair], pair))"
ADD = "pairs[pair] += counts[piece]"
MIN = "min(pairs, key=rank.get)"
BITS = "loss * tokens / np.log(2) / nbytes"

MISTAKES = [
    ("38.1", "            i += 2", "            i += 2\n            out += tokens[i:]\n            break", "Only the first occurrence"),
    ("38.1", "            i += 2", "            i += 1", "go on by two"),
    ("38.1", "i < len(tokens):", "i < len(tokens) - 1:", "The last token is missing"),
    ("38.1", "out.append(tokens[i] + tokens[i + 1])", "out += pair", "Expected"),
    ("38.1", "out.append(tokens[i] + tokens[i + 1])", "pass", "The pair was removed"),
    ("38.1", "out.append(tokens[i] + tokens[i + 1])", "out.append((tokens[i], tokens[i + 1]))", "A token is bytes"),
    ("38.1", "return out", "out", "Nothing is returned"),
    ("38.1", IF, "if (tokens[i], tokens[i + 1]) == tuple(pair):", "no right neighbour"),
    ("38.2", ADD, "pairs[pair] += 1", "A piece counts once here"),
    ("38.2", "(-pairs[pair], pair)", "-pairs[pair]", "take the SMALLEST"),
    ("38.2", BEST, "max(pairs, key=lambda pair: (pairs[pair], pair))", "take the SMALLEST"),
    ("38.2", "-pairs[pair], pair", "pairs[pair], pair", "The RAREST pair"),
    ("38.2", "in pairwise(tokens)", "in set(pairwise(tokens))", "counts twice"),
    ("38.2", "if not pairs:", "if not pairs or max(pairs.values()) < 2:", "A pair that occurs once"),
    ("38.2", "len(merges) < n", "len(merges) <= n", "one merge too many"),
    ("38.2", "        if not pairs:\n            break\n", "", "There may be no pair"),
    ("38.2", "merges.append(best)", "merges.append(best[0] + best[1])", "A merge is a pair"),
    ("38.2", "[bytes([b]) for b in piece]", "list(piece)", "A merge is a pair"),
    ("38.2", "return merges", "return dict.fromkeys(merges)", "Return a list of pairs"),
    ("38.3", MIN, "max(pairs, key=rank.get)", "min of the ranks"),
    ("38.3", MIN, "pairs[0]", "The first pair in the PIECE"),
    ("38.3", "    while True:", "    for _ in range(1):", "Nothing is returned"),
    ("38.3", "        tokens = joined(" , "        return joined(", "One pair is joined"),
    ("38.3", "        if not pairs:\n            return tokens\n", "", "then the piece is done"),
    ("38.3", "[bytes([b]) for b in piece]", "list(piece)", "A token is bytes"),
    ("38.4", BITS, "loss * tokens / nbytes", "These are nats"),
    ("38.4", BITS, "loss * tokens * np.log(2) / nbytes", "a bit is smaller"),
    ("38.4", BITS, "loss / np.log(2)", "These are bits per token"),
    ("38.4", BITS, "loss * nbytes / np.log(2) / tokens", "are exchanged"),
    ("38.4", BITS, "np.exp(loss * tokens / nbytes)", "perplexity"),
    ("38.4", BITS, "loss * tokens / np.log(2)", "divide by its bytes"),
    ("38.4", "return float(" + BITS + ")", "float(" + BITS + ")", "Nothing is returned"),
]  # fmt: skip

RIGHT = [
    ("38.1", IF, "if i + 1 < len(tokens) and tokens[i] == pair[0] and tokens[i + 1] == pair[1]:"),
    ("38.2", BEST, "sorted(pairs, key=lambda pair: (-pairs[pair], pair))[0]"),
    ("38.3", "    while True:", "    for _ in range(len(piece) + 1):"),
    ("38.4", BITS, "loss * np.log2(np.e) * (tokens / nbytes)"),
]  # fmt: skip
