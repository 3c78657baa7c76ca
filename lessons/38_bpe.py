# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 38 Byte pair encoding from scratch
#
# *About 75 minutes. You need [lesson 8](08_training.ipynb).*
#
# **The question.** A model reads and writes ids, not text. Who decided that ` walked` is one id and ` Walked` four, why
# does another tokenizer give other ids for the same text, and how can two models be compared whose tokens differ?
#
# You will write byte pair encoding (BPE): the merge of a pair, the training that finds the pairs, and the encoding that
# applies them; then the number that makes models with different tokenizers comparable. At the end your encoder gives the
# ids of xtrain's tokenizer, id for id.

# %% tags=["install"]
# On Google Colab (a free T4 is enough) this fetches xtrain. Anywhere else it does nothing.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("setup.cfg"):
    clone = "git clone -q --depth 1 https://github.com/OWNER/xtrain xtrain"
    subprocess.run(f"{clone} && pip install -q -e './xtrain[gpu12]'", shell=True, check=True)
    os.chdir("xtrain")
    sys.path.insert(0, os.getcwd())

# %% tags=["imports"]
import re
from collections import Counter
from itertools import pairwise

import numpy as np

import xtrain
from xtrain import lesson

# %% [markdown]
# ## Bytes, by hand
#
# A computer's text is a sequence of bytes: UTF-8 gives one to a letter of English, two to é, four to 🙂. With the 256 bytes
# as tokens no text is unknown. But a text has as many tokens as bytes, and a model's work grows with the tokens.

# %%
for text in ("walk", "é", "🙂"):
    print(f"{text!r:7} {list(text.encode())}")

# %% [markdown]
# So join what occurs together often. BPE begins with bytes and repeats one step: find the pair of neighbours that occurs most
# often, and make a new token of it. By hand, with the text `abababcab`:
#
# | step | tokens | pairs, how often | new token |
# |---|---|---|---|
# | 1 | a b a b a b c a b | ab 4, ba 2, bc 1, ca 1 | ab |
# | 2 | ab ab ab c ab | abab 2, abc 1, cab 1 | abab |
# | 3 | abab ab c ab | abab·ab 1, ab·c 1, c·ab 1 | a tie |
#
# In step 2 the three `ab` are two pairs that overlap, and both count. But they cannot both be joined: the one on the left is.
#
# ## Exercise 38.1: join a pair


# %% tags=["exercise"]
def joined(tokens, pair):
    """-> a new list in which each occurrence of the pair is one token, from left to right.

    tokens: a list of bytes objects, perhaps empty. pair: (left, right). A token takes part in one
    pair at most: three times a, with the pair (a, a), become aa and a.
    """
    # YOUR CODE


# %%
lesson.check("38.1", joined)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A loop with an index: `while i < len(tokens)`. If `tuple(tokens[i : i + 2]) == pair`, append `left + right` and go on by 2,
# else append `tokens[i]` and go on by 1.
#
# </details>


# %% tags=["solution"]
# Solution 38.1
def joined_solution(tokens, pair):
    """-> a new list in which each occurrence of the pair is one token, from left to right.

    tokens: a list of bytes objects, perhaps empty. pair: (left, right). A token takes part in one
    pair at most: three times a, with the pair (a, a), become aa and a.
    """
    out, i = [], 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == tuple(pair):
            out.append(tokens[i] + tokens[i + 1])
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


joined = lesson.yours(joined, joined_solution)


# %%
tokens = [bytes([b]) for b in b"abababcab"]
for pair in ((b"a", b"b"), (b"ab", b"ab")):
    tokens = joined(tokens, pair)
    print(tokens)

# %% [markdown]
# ## Words first
#
# Without a limit, BPE would join ` of the` into one token, because it is frequent. That wastes tokens on phrases, so the text
# is cut into **pieces** first, and pairs are counted inside pieces only. A piece is a word with the space before it, a number, or
# punctuation. This pattern is that of GPT-2, and xtrain's tokenizer uses it:

# %%
PIECE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
print(PIECE.findall("She walked 12 miles, didn't she?  Yes."))

# %% [markdown]
# The pieces add up to the text, so nothing is lost. And a piece that occurs a thousand times is needed once, with its count. That is
# what makes training fast. Here is a language of made-up sentences, whose words are stems with endings:

# %%
STEMS = ["walk", "talk", "jump", "look", "play", "work", "call", "help", "paint", "climb"]
ENDINGS = ["", "s", "ed", "ing", "er", "ers"]
OTHER_STEMS = ["lauf", "spiel", "such", "koch", "bau", "mal", "frag", "lern", "wart", "kauf"]
OTHER_ENDINGS = ["en", "st", "t", "te", "ten", "er"]


def sentences(n, stems, endings, rng):
    """-> a text of n sentences"""
    some = np.array([s + e for s in stems for e in endings])
    weights = np.repeat(1 / (4 + np.arange(len(stems))), len(endings))  # the first are frequent
    words = rng.choice(some, (n, 4), p=weights / weights.sum())
    return " ".join(f"The {a} {b} the {c}, and {d}." for a, b, c, d in words)


rng = np.random.default_rng(0)
text = sentences(2000, STEMS, ENDINGS, rng)
other = sentences(2000, OTHER_STEMS, OTHER_ENDINGS, rng)
counts = Counter(piece.encode() for piece in PIECE.findall(text))
print(text[:78])
print(
    f"{len(text.encode()):,} bytes, {sum(counts.values()):,} pieces, {len(counts)} different ones"
)

# %% [markdown]
# ## Exercise 38.2: find the merges
#
# Of pairs that occur equally often take the smallest, as Python compares tuples of bytes, so that everyone finds the same merges.


# %% tags=["exercise"]
def learn(counts, n):
    """-> the merges, a list of at most n pairs (left, right), in the order in which they are found.

    counts: {piece: how often it occurs}, pieces are bytes. At first a piece is its single bytes.
    Again and again: the pair of neighbours in a piece that occurs most often, over all pieces as
    often as they occur, is joined everywhere. Of equally frequent ones: the smallest pair. It ends
    before n merges if no piece has a pair left. `joined` of 38.1 may be called.
    """
    # YOUR CODE


# %%
lesson.check("38.2", learn)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep a dict from each piece to its list of tokens. In each step count: for a piece that occurs `count` times, each of its
# `pairwise(tokens)` gets `count` more. A `Counter` begins at 0.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `best = min(pairs, key=lambda pair: (-pairs[pair], pair))`: the most frequent, then the smallest. Then every list becomes
# `joined(tokens, best)`.
#
# </details>


# %% tags=["solution"]
# Solution 38.2
def learn_solution(counts, n):
    """-> the merges, a list of at most n pairs (left, right), in the order in which they are found.

    counts: {piece: how often it occurs}, pieces are bytes. At first a piece is its single bytes.
    Again and again: the pair of neighbours in a piece that occurs most often, over all pieces as
    often as they occur, is joined everywhere. Of equally frequent ones: the smallest pair. It ends
    before n merges if no piece has a pair left. `joined` of 38.1 may be called.
    """
    pieces = {piece: [bytes([b]) for b in piece] for piece in counts}
    merges = []
    while len(merges) < n:
        pairs = Counter()
        for piece, tokens in pieces.items():
            for pair in pairwise(tokens):
                pairs[pair] += counts[piece]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for piece in pieces:
            pieces[piece] = joined(pieces[piece], best)
    return merges


learn = lesson.yours(learn, learn_solution)


# %%
merges = learn(counts, 60)
for first in (0, 20, 52):
    print(
        f"merges {first:2} to {first + 7}:",
        *(f"{a + b!r}"[1:] for a, b in merges[first : first + 8]),
    )

# %% [markdown]
# First come parts that many words share: `he`, `er`, ` t`. Then stems with a space are put together, and at last whole words, the most
# frequent first. BPE does not know what a stem is; it finds them because they occur often.
#
# ## Exercise 38.3: encode
#
# A new text is encoded by the same merges, in the order of their **rank**, their place in the list: as long as a piece has a pair of
# neighbours that is in the list, join the pair that was found *first*.


# %% tags=["exercise"]
def encode(piece, merges):
    """-> the tokens of a piece, a list of bytes objects.

    piece: bytes, perhaps empty. merges: a list of pairs. As long as two neighbours are a pair of
    the list: of all such pairs in the piece, join the one that is first in the list.
    """
    # YOUR CODE


# %%
lesson.check("38.3", encode)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `rank = {pair: i for i, pair in enumerate(merges)}`. Then a loop: the pairs of neighbours that are in `rank`; if there are none,
# the piece is done; else `tokens = joined(tokens, min(pairs, key=rank.get))`.
#
# </details>


# %% tags=["solution"]
# Solution 38.3
def encode_solution(piece, merges):
    """-> the tokens of a piece, a list of bytes objects.

    piece: bytes, perhaps empty. merges: a list of pairs. As long as two neighbours are a pair of
    the list: of all such pairs in the piece, join the one that is first in the list.
    """
    rank = {tuple(pair): i for i, pair in enumerate(merges)}
    tokens = [bytes([b]) for b in piece]
    while True:
        pairs = [pair for pair in pairwise(tokens) if pair in rank]
        if not pairs:
            return tokens
        tokens = joined(tokens, min(pairs, key=rank.get))


encode = lesson.yours(encode, encode_solution)


# %%
def shown(text, merges=merges):
    return " | ".join(
        b.decode("utf-8", "replace")
        for p in PIECE.findall(text)
        for b in encode(p.encode(), merges)
    )


for example in ("The walker", "the walker", "walker", " climbers", " 1984", " Walking", " walking"):
    print(f"{example!r:13} {shown(example)}")

# %% [markdown]
# How one piece is put together:


# %%
def tree(piece, merges):
    """-> places of the tokens that occur on the way, and which one joins which"""
    tokens = [(bytes([b]), i, 0) for i, b in enumerate(piece)]  # token, column, row
    name = lambda t: (
        f"{t[0].decode().replace(' ', '_')}{' ' * round(2 * t[1])}"
    )  # equal letters differ by spaces
    places, edges = {name(t): t[1:] for t in tokens}, []
    while True:
        ranks = [
            merges.index((a[0], b[0])) if (a[0], b[0]) in merges else len(merges)
            for a, b in pairwise(tokens)
        ]
        if not ranks or min(ranks) == len(merges):
            return places, edges
        i = ranks.index(min(ranks))
        a, b = tokens[i : i + 2]
        new = (a[0] + b[0], (a[1] + b[1]) / 2, max(a[2], b[2]) + 1)
        places[name(new)] = new[1:]
        edges += [(name(a), name(new)), (name(b), name(new))]
        tokens[i : i + 2] = [new]


lesson.figures.graph(*tree(b" painted", merges), "how ' painted' is encoded; _ is the space")

# %% [markdown]
# ## Why ids differ
#
# The id of a token is 256 plus its rank (the bytes come first). From this follows almost everything that surprises people:
#
# - **The training text decides.** Other text, other merges, other ids, and the language that the tokenizer was trained on needs fewer
#   tokens than any other one.
# - **A space belongs to the word after it.** `walker` and ` walker` are different tokens, and a prompt that ends with a space ends
#   with a token that rarely occurs before a word.
# - **Capital letters are other bytes.** ` Walking` has four tokens, as shown above, and ` walking` is one: they share none.
# - **Text is not encoded part by part.** The tokens of two parts are not always those of the whole:

# %%
whole, parts = shown("The walkers"), [shown("The walk"), shown("ers")]
print(whole, "   but ", *parts, sep="  ")
reverse = learn(Counter(p.encode() for p in PIECE.findall(other)), 60)
for name, t in (("its own language", text), ("another one", other)):
    nbytes, rows = len(t.encode()), []
    for found in (merges, reverse):
        used = Counter(PIECE.findall(t))
        rows.append(nbytes / sum(n * len(encode(p.encode(), found)) for p, n in used.items()))
    print(f"{name:17} bytes per token: {rows[0]:.2f} with these merges, {rows[1]:.2f} with others")

# %% [markdown]
# ## Measure: what a larger vocabulary costs
#
# More merges make fewer tokens, so fewer steps of the model per text, and more text in a context. But each token is a row of the
# embedding and of the head:

# %%
sizes = [0, 15, 30, 45, 60, 75]
lines = {"this language": [], "the other": []}
found = learn(counts, sizes[-1])
print("merges   bytes per token   rows of the embedding, of a width of 768")
for n in sizes:
    for name, t in zip(lines, (text, other)):
        used = Counter(PIECE.findall(t))
        tokens = sum(k * len(encode(p.encode(), found[:n])) for p, k in used.items())
        lines[name].append(len(t.encode()) / tokens)
    print(f"{n:6} {lines['this language'][-1]:17.2f} {(256 + n) * 768:14,} numbers")
lesson.figures.curves(sizes, lines, "merges", "bytes per token", log=False)

# %% [markdown]
# The other language gains from the first merges only, whose letters it shares. Real text has more frequent words, and a real
# vocabulary more tokens: 32,000 in Llama 2, 151,936 in Qwen3.
#
# ## Comparing models: bits per byte
#
# A model's loss is per *token*, in nats. A model with longer tokens has to guess more per token, so its loss is higher even if it is
# better. Per *byte* of the same text, losses are comparable: the loss of all tokens together, in bits, over the bytes.
#
# By hand: 100 tokens with a loss of 2.0, for a text of 400 bytes: $100 \cdot 2.0 / \ln 2 = 288.5$ bits, 0.72 per byte.
#
# ## Exercise 38.4: bits per byte


# %% tags=["exercise"]
def bits_per_byte(loss, tokens, nbytes):
    """-> bits per byte, a float. loss: nats per token, the mean over `tokens` tokens.

    nbytes: bytes of the text that these tokens are.
    """
    # YOUR CODE


# %%
lesson.check("38.4", bits_per_byte)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One nat is 1 / ln 2 bits, about 1.44. `np.log` is the natural logarithm.
#
# </details>


# %% tags=["solution"]
# Solution 38.4
def bits_per_byte_solution(loss, tokens, nbytes):
    """-> bits per byte, a float. loss: nats per token, the mean over `tokens` tokens.

    nbytes: bytes of the text that these tokens are.
    """
    return float(loss * tokens / np.log(2) / nbytes)


bits_per_byte = lesson.yours(bits_per_byte, bits_per_byte_solution)

# %% [markdown]
# Two small models read the same text, one as bytes, one as tokens, in rows of 32 and with the same number of *tokens* per step:


# %% tags=["varies"]
def ids_of(text, merges):
    number = {bytes([b]): b for b in range(256)} | {
        a + b: 256 + i for i, (a, b) in enumerate(merges)
    }
    known = {p: [number[t] for t in encode(p.encode(), merges)] for p in set(PIECE.findall(text))}
    return np.array([i for p in PIECE.findall(text) for i in known[p]], np.int32)


held_out = sentences(200, STEMS, ENDINGS, np.random.default_rng(1))
shape = dict(dim=48, n_layers=2, n_heads=4, head_dim=12, hidden_dim=96, max_seq_len=32)
print("tokens       loss per token   bits per byte   tokens of the held-out text")
for name, used in (("bytes", []), ("60 merges", merges)):
    ids, test = ids_of(text, used), ids_of(held_out, used)
    model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=256 + len(used), **shape), seed=0)
    optimizer = xtrain.AdamW(model, lr=1e-2, weight_decay=0.0)
    picks = np.random.default_rng(2)
    for step in range(150):
        optimizer.lr = 1e-2 * min(1, (step + 1) / 10) * (1 - step / 150)
        at = picks.integers(0, len(ids) - 33, 16)
        rows = np.stack([ids[i : i + 33] for i in at])
        model.zero_grad()
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    n = len(test) // 32 * 32
    with xtrain.no_grad():
        loss = model.loss(test[: n - 32].reshape(-1, 32), test[1 : n - 31].reshape(-1, 32)).item()
    bits = bits_per_byte(loss, len(test), len(held_out.encode()))
    print(f"{name:11} {loss:15.2f} {bits:15.2f} {len(test):12,}")

# %% [markdown]
# The model of tokens has the higher loss per token and the lower number of bits per byte: it has seen several times as much text in
# the same number of steps, and needs fewer steps to write a sentence.
#
# **The improvement** in training time: your 38.2 counts all pairs again after each merge, though only the pieces that contained the
# pair have changed. Real trainers keep, for each pair, the pieces in which it occurs, and a heap of counts.
#
# ## The library's kernel
#
# This lesson has no kernel. xtrain trains with the `tokenizers` library, which does the same in Rust:

# %%
from xtrain.data.tokenizer import Tokenizer

lesson.source(Tokenizer.train)

# %% [markdown]
# Does your encoder give its ids? From its file come the merges, and from its vocabulary the id of each token:

# %%
theirs = Tokenizer.train([text], 257 + 60)
model_of = theirs.content()["model"]
as_bytes = {s: theirs.token_bytes[i] for s, i in model_of["vocab"].items()}
their_merges = [(as_bytes[a], as_bytes[b]) for a, b in model_of["merges"]]
ids = {b: i for i, b in enumerate(theirs.token_bytes)}
for example in ("The walkers played, and 12 🙂 helped the painter.", other[:200]):
    mine = [ids[t] for p in PIECE.findall(example) for t in encode(p.encode(), their_merges)]
    print(f"{len(mine)} ids, the same: {mine == theirs.encode(example)}")
print(f"{len(set(their_merges) & set(merges))} of {len(merges)} merges are also yours")

# %% [markdown]
# The others come from ties, which the two break differently.
#
# ## What did not help
#
# *The longest token that fits.* Simple, and some tokenizers do it (WordPiece). But with the merges of BPE it gives other tokens than
# the training saw, and a model must be fed the tokens that it was trained with.
#
# *Merges across spaces.* Frequent phrases become tokens, which are good for one text and useless for the next. That is what the
# pieces prevent. (Some tokenizers allow them again, after the words have been found.)
#
# *Characters instead of bytes.* Every character that the training did not see is unknown, and Unicode has more of them than a vocabulary should have tokens.
#
# ## More exercises
#
# 1. Why are digits often cut into pieces of one to three? Encode ` 1984`, ` 1985` with merges that were learned from years.
# 2. Which text needs more tokens than bytes? And at most how many tokens has a text of n bytes?
# 3. A model has a vocabulary of 32,000. You want to add 100 words of your field as tokens. What has to be changed in the model, and
#    what in the texts that it was trained on?
#
# <details><summary>Solutions</summary>
#
# 1: Years that occur often become one token, others several: ` 1984` is one number and ` 1985` is ` 19` and `85`, so arithmetic has to be
# learned again for every token. With fixed pieces, digits in the same place are the same tokens. 2: None: at worst each byte is a token.
# Special tokens that begin and end a text come in addition. 3: Embedding and head get 100 new rows, which have to be trained. The texts of
# the training had other tokens for these words, so the model knows the words by those, and only new text teaches it the new ones.
#
# </details>
#
# ## Sources
#
# - P. Gage, *A New Algorithm for Data Compression*, The C Users Journal, 1994: joins pairs of bytes.
# - R. Sennrich, B. Haddow, A. Birch, *Neural Machine Translation of Rare Words with Subword Units*, ACL 2016.
# - A. Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019: bytes, and the pattern of the pieces.
