"""Typical mistakes, planted in the solutions of lesson 42: (exercise, old, new, words of the answer)."""

PREDICATE = '        if words[0].startswith("@"):\n            words = words[1:]\n'
LABEL = '        if words[0].endswith(":"):\n            continue\n'
MANY = '2 if "v2" in words else 4 if "v4" in words else 1'
WARPS = "math.ceil(n / threads) * math.ceil(threads / 32)"
BACK = "places.get(label, here) < here"

MISTAKES = [
    ("42.1", PREDICATE, "", "A predicate is no opcode"),
    ("42.1", 'startswith("@")', 'startswith("@%")', "`@!%p1` is a predicate"),
    ("42.1", '.rstrip(";")', "", "The semicolon"),
    ("42.1", LABEL, "", "A label ends with a colon"),
    ("42.1", '(".", "//")', '("//",)', "directives"),
    ("42.1", '(".", "//")', '(".",)', "Comments begin"),
    ("42.1", "not words or words[0]", "words[0]", "A line may be empty"),
    ("42.1", '.rstrip(";")', '.rstrip(";").split(".")[0]', "has its types with it"),
    ("42.2", ' and words[1] == "global"', "", "Only global memory"),
    ("42.2", MANY, "1", "v4 moves four"),
    ("42.2", " // 8", "", "which are 4 bytes"),
    ("42.2", "int(words[-1][1:]) // 8", "4", "Not every type has 4 bytes"),
    ("42.2", "count * many", "many", "as often as the dict says"),
    ("42.2", 'return moved["ld"], moved["st"]', 'return moved["st"], moved["ld"]', "Return read first"),
    ("42.2", 'words[0] in moved and words[1] == "global"', 'words[1] == "global"', "look at words[0] first"),
    ("42.3", BACK, "places.get(label, here) <= here", "to itself is no loop"),
    ("42.3", " if " + BACK, " if places.get(label, here) != here", "A jump forwards"),
    ("42.3", "(places[label], here)", "(here, places[label])", "First the address of the label"),
    ("42.3", "address[1], 16", "address[1], 10", "hexadecimal"),
    ("42.3", "        waiting = []\n", "", "the address of the instruction after it"),
    ("42.3", r"BRA `\((\S+)\)", r"\*/ +BRA `\((\S+)\)", "A BRA with a predicate"),
    ("42.3", "return [", "[", "Nothing is returned"),
    ("42.4", WARPS, "n", "count warps"),
    ("42.4", WARPS, "math.ceil(n / 32)", "issued as a whole"),
    ("42.4", WARPS, "n / threads * math.ceil(threads / 32)", "Blocks are whole"),
    ("42.4", WARPS, "math.ceil(n / threads) * threads / 32", "Warps are whole"),
    ("42.4", "(4 * card", "(card", "four parts"),
    ("42.4", "n * nbytes /", "nbytes /", "those of one element"),
    ("42.4", 'return issue, n * nbytes / card["bandwidth"]', 'return n * nbytes / card["bandwidth"], issue', "Return issue first"),
]  # fmt: skip

RIGHT = [
    ("42.1", "return dict(counts)", "return counts"),
    ("42.2", MANY, '{"v2": 2, "v4": 4}.get(words[-2], 1)'),
    ("42.3", "line.endswith(\":\")", "re.fullmatch(r\"\\S+:\", line)"),
    ("42.4", WARPS, "-(-n // threads) * -(-threads // 32)"),
]  # fmt: skip
