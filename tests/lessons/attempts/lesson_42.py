"""Attempts at the exercises of lesson 42: see test_attempts.py."""


# %% 42.1 RIGHT: one regular expression
def opcodes(ptx):
    return dict(Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)", ptx, re.M)))


# %% 42.1 RIGHT: filters one after the other
def opcodes(ptx):
    lines = [line.strip().rstrip(";") for line in ptx.split("\n")]
    lines = [line for line in lines if line and line[0] not in "{}./$" and not line.endswith(":")]
    counts = {}
    for line in lines:
        parts = line.split()
        name = parts[1] if parts[0][0] == "@" else parts[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


# %% 42.1 WRONG: A predicate is no opcode
def opcodes(ptx):
    counts = Counter()
    for line in ptx.splitlines():
        line = line.strip().rstrip(";")
        if line and line[0] not in "{}./$":
            counts[line.split()[0]] += 1
    return dict(counts)


# %% 42.1 WRONG: Each opcode counts as often
def opcodes(ptx):
    return {m: 1 for m in re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)", ptx, re.M)}


# %% 42.1 WRONG: Lines with a predicate are instructions
def opcodes(ptx):
    return dict(Counter(re.findall(r"^\s*([a-z][\w.]*)", ptx, re.M)))


# %% 42.1 WRONG: Return a dict
def opcodes(ptx):
    return re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)", ptx, re.M)


# %% 42.2 RIGHT: regular expressions
def traffic(counts):
    total = {"ld": 0, "st": 0}
    for name, n in counts.items():
        m = re.fullmatch(r"(ld|st)\.global(?:\.nc)?(?:\.v(\d))?\.[a-z](\d+)", name)
        if m:
            total[m[1]] += n * int(m[2] or 1) * int(m[3]) // 8
    return total["ld"], total["st"]


# %% 42.2 RIGHT: two sums
def traffic(counts):
    def size(name):
        *words, kind = name.split(".")
        return int(kind[1:]) / 8 * (4 if "v4" in words else 2 if "v2" in words else 1)

    return [
        sum(n * size(k) for k, n in counts.items() if k.startswith(f"{op}.global."))
        for op in ("ld", "st")
    ]


# %% 42.2 WRONG: Only global memory counts
def traffic(counts):
    total = [0, 0]
    for name, n in counts.items():
        w = name.split(".")
        if w[0] in ("ld", "st"):
            many = {"v2": 2, "v4": 4}.get(w[-2], 1)
            total[w[0] == "st"] += n * many * int(w[-1][1:]) // 8
    return tuple(total)


# %% 42.2 WRONG: Not every type has 4 bytes
def traffic(counts):
    total = [0, 0]
    for name, n in counts.items():
        w = name.split(".")
        if w[:2] in (["ld", "global"], ["st", "global"]):
            total[w[0] == "st"] += n * 4 * {"v2": 2, "v4": 4}.get(w[-2], 1)
    return tuple(total)


# %% 42.2 WRONG: v2 moves two numbers
def traffic(counts):
    total = [0, 0]
    for name, n in counts.items():
        w = name.split(".")
        if w[:2] in (["ld", "global"], ["st", "global"]):
            total[w[0] == "st"] += n * int(w[-1][1:]) // 8 * (4 if "v4" in w else 1)
    return tuple(total)


# %% 42.3 RIGHT: from the end to the start
def loops(sass):
    lines = [line.strip() for line in sass.splitlines() if line.strip()]
    where, address = {}, None
    for line in reversed(lines):
        if line[0] == "/":
            address = int(line[2:6], 16)
        elif line[-1] == ":":
            where[line[:-1]] = address
    out = []
    for line in lines:
        if "BRA `(" in line:
            target = line.split("`(")[1].split(")")[0]
            here = int(line[2:6], 16)
            if target in where and where[target] < here:
                out.append((where[target], here))
    return out


# %% 42.3 RIGHT: one pass, since a loop's label comes first
def loops(sass):
    seen, new, out = {}, [], []
    for line in sass.splitlines():
        if m := re.match(r"\s*(\.L\w+):", line):
            new.append(m[1])
        elif m := re.match(r"\s*/\*([0-9a-f]+)\*/", line):
            here = int(m[1], 16)
            for label in new:
                seen[label] = here
            new = []
            t = re.search(r"BRA `\(([^)]+)\)", line)
            if t and seen.get(t[1], here) != here:
                out.append((seen[t[1]], here))
    return out


# %% 42.3 WRONG: to itself is no loop
# as the attempt above, but:
# -             if t and seen.get(t[1], here) != here:
# +             if t and t[1] in seen:


# %% 42.3 WRONG: In the order of the last
# as the attempt above, but:
# -     return out
# +     return sorted(out)


# %% 42.3 WRONG: the numbers of instructions
# as the attempt above, but:
# -                 out.append((seen[t[1]], here))
# +                 out.append((here - seen[t[1]]) // 16 + 1)


# %% 42.4 RIGHT: integers
def limits(n, threads, instructions, nbytes, card):
    blocks = (n + threads - 1) // threads
    warps = blocks * ((threads + 31) // 32)
    per_second = 4 * card["multiprocessors"] * card["clock"]
    return warps * instructions / per_second, n * nbytes / card["bandwidth"]


# %% 42.4 WRONG: count warps
def limits(n, threads, instructions, nbytes, card):
    per_second = 4 * card["multiprocessors"] * card["clock"]
    return n * instructions / per_second, n * nbytes / card["bandwidth"]


# %% 42.4 WRONG: each has ceil(threads / 32) warps
def limits(n, threads, instructions, nbytes, card):
    per_second = 4 * card["multiprocessors"] * card["clock"]
    return math.ceil(n / threads) * instructions / per_second, n * nbytes / card["bandwidth"]


# %% 42.4 WRONG: four parts
def limits(n, threads, instructions, nbytes, card):
    warps = math.ceil(n / threads) * math.ceil(threads / 32)
    per_second = card["multiprocessors"] * card["clock"]
    return warps * instructions / per_second, n * nbytes / card["bandwidth"]


# %% 42.4 WRONG: not the other way round
def limits(n, threads, instructions, nbytes, card):
    warps = math.ceil(n / threads) * math.ceil(threads / 32)
    per_second = 4 * card["multiprocessors"] * card["clock"]
    return warps * instructions / per_second, card["bandwidth"] / (n * nbytes)


# %% 42.1 WRONG: not an opcode of the listing
def opcodes(ptx):
    c = {}
    for line in ptx.splitlines():
        w = line.split()
        if not w:
            continue
        if w[0][0] == "@":
            w = w[1:]
        op = w[0].rstrip(";")
        c.setdefault(op, 0)
        if op in "{}" or op[0] in "./" or op[-1] == ":":
            continue
        c[op] += 1
    return c


# %% 42.2 WRONG: Only ld and st count
def traffic(counts):
    r = w = 0
    for k, n in counts.items():
        p = k.split(".")
        if "global" in p:
            b = int(p[-1][1:]) // 8 * (4 if "v4" in p else 2 if "v2" in p else 1)
            if p[0] == "st":
                w += b * n
            else:
                r += b * n
    return r, w


# %% 42.2 WRONG: Only global memory counts
def traffic(counts):
    r = w = 0
    for k, n in counts.items():
        p = k.split(".")
        if p[0] in ("ld", "st") and p[1] not in ("param", "shared"):
            b = int(p[-1][1:]) // 8 * (4 if "v4" in p else 2 if "v2" in p else 1)
            if p[0] == "st":
                w += b * n
            else:
                r += b * n
    return r, w


# %% 42.3 WRONG: Several labels may stand
def loops(sass):
    places, w, out = {}, None, []
    for l in map(str.strip, sass.splitlines()):
        if l.endswith(":"):
            w = l[:-1]
        m = re.match(r"/\*(\w+)\*/", l)
        if m:
            a = int(m[1], 16)
            if w:
                places[w] = a
            w = None
            j = re.search(r"BRA `\((\S+)\)", l)
            if j and j[1] in places and places[j[1]] < a:
                out.append((places[j[1]], a))
    return out


# %% 42.3 WRONG: not the one after it
def loops(sass):
    places, w, out = {}, [], []
    for l in map(str.strip, sass.splitlines()):
        if l.endswith(":"):
            w.append(l[:-1])
        m = re.match(r"/\*(\w+)\*/", l)
        if m:
            a = int(m[1], 16)
            for k in w:
                places[k] = a
            w = []
            j = re.search(r"BRA `\((\S+)\)", l)
            if j and j[1] in places and places[j[1]] < a:
                out.append((places[j[1]], a + 16))
    return out


# %% 42.4 WRONG: not for threads past the end
def limits(n, threads, instructions, nbytes, card):
    b = math.ceil(n / threads)
    w = b * math.ceil(threads / 32)
    return w * instructions / (
        4 * card["multiprocessors"] * card["clock"]
    ), b * threads * nbytes / card["bandwidth"]
