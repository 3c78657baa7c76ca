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
# # 22 Closing the loop: weights in and out
#
# *About 60 minutes. You need [lesson 7](07_model.ipynb) and [lesson 18](18_kv_cache.ipynb).*
#
# **The question.** A company has trained a model for ten million dollars and published the weights.
# Can we run it? And if the generated text is *almost* right, how do we find out which of a thousand
# lines is wrong?
#
# You will read the file format in which weights are distributed, convert between the two layouts
# that cause the most trouble, and write the tool that finds the first stage where two
# implementations diverge. At the end, a model makes a round trip through another library.

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
import json
import struct
import tempfile
from pathlib import Path

import numpy as np

import xtrain
from xtrain import lesson

# %% [markdown]
# ## What is in a model folder
#
# A Hugging Face folder contains three things: `config.json` (the architecture), `model.safetensors`
# (the weights), and a tokenizer. Save a small model, which has no tokenizer, and look at its files:

# %%
config = xtrain.ModelConfig(
    vocab_size=96,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=64,
    qk_norm=False,
)
model = xtrain.Transformer(config, seed=0, device="cpu")
folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder)
print(sorted(p.name for p in folder.iterdir()))
about = json.loads((folder / "config.json").read_text())
for key in (
    "architectures",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
):
    print(f"{key:22} {about[key]}")

# %% [markdown]
# The weights file is simple enough to read by hand. The first 8 bytes are a number n. The next n
# bytes are JSON, with the name, type, shape and offsets of every tensor. Then follow the numbers,
# one tensor after another.

# %%
data = (folder / "model.safetensors").read_bytes()
n = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8 : 8 + n])
print(f"{len(data):,} bytes, of which {n:,} are the header")
for name in list(header)[:4]:
    print(name, header[name])

# %% [markdown]
# ## Exercise 22.1: read the file


# %% tags=["exercise"]
def read_safetensors(data):
    """-> {name: array} from the bytes of a file. Types: F32, F16, I64.

    `data_offsets` [begin, end) count bytes from the end of the header. `__metadata__` is not
    a tensor.
    """
    KINDS = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
    # YOUR CODE


# %%
lesson.check("22.1", read_safetensors)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Use `begin, end = about["data_offsets"]` and `np.frombuffer(data[first + begin : first + end],
# kind).reshape(shape)`, where first is 8 + n.
#
# </details>


# %% tags=["solution"]
# Solution 22.1
def read_safetensors_solution(data):
    """-> {name: array} from the bytes of a file. Types: F32, F16, I64.

    `data_offsets` [begin, end) count bytes from the end of the header. `__metadata__` is not
    a tensor.
    """
    KINDS = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
    n = struct.unpack("<Q", data[:8])[0]
    first = 8 + n
    tensors = {}
    for name, about in json.loads(data[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = data[first + begin : first + end]
        tensors[name] = np.frombuffer(raw, KINDS[about["dtype"]]).reshape(about["shape"])
    return tensors


read_safetensors = lesson.yours(read_safetensors, read_safetensors_solution)


# %%
tensors = read_safetensors(data)
same = all(np.array_equal(tensors[name], p.data) for name, p in model.named_parameters())
print(f"{len(tensors)} tensors, equal to the model's parameters: {same}")

# %% [markdown]
# ## Pairs and halves
#
# One difference comes up whenever Llama weights are converted. RoPE rotates planes, and each plane
# consists of two channels of a head: *which* two? In Meta's own files they are neighbours, (0, 1),
# (2, 3), ...; in the Hugging Face layout they are channel r of the lower half and channel r of the
# upper half. Neither layout is better. But if a model was trained with neighbours and is run with
# halves, it rotates the wrong pairs, and its output becomes nonsense as soon as tokens are a few
# positions apart.
#
# The channels of a head are rows of the query and key weights. So the conversion reorders rows:
# within each head, first all first members of the pairs, then all second members. By hand, for one
# head of 6:
#
# ```text
# pairs    a0 b0 a1 b1 a2 b2        halves   a0 a1 a2 b0 b1 b2
# ```
#
# ## Exercise 22.2: from pairs to halves


# %% tags=["exercise"]
def pairs_to_halves(w_OC, H):
    """-> (H D, C): the query or key weight w (H D, C), with the rows of each of H heads
    reordered from Meta's layout to Hugging Face's.
    """
    C = w_OC.shape[1]
    # YOUR CODE


# %%
lesson.check("22.2", pairs_to_halves)

# %% [markdown]
# <details><summary>Hint</summary>
#
# View the rows as (H, D / 2 planes, 2 members, C) and swap two axes: `reshape`, `transpose`,
# `reshape`.
#
# </details>


# %% tags=["solution"]
# Solution 22.2
def pairs_to_halves_solution(w_OC, H):
    """-> (H D, C): the query or key weight w (H D, C), with the rows of each of H heads
    reordered from Meta's layout to Hugging Face's.
    """
    C = w_OC.shape[1]
    return w_OC.reshape(H, -1, 2, C).transpose(0, 2, 1, 3).reshape(-1, C)


pairs_to_halves = lesson.yours(pairs_to_halves, pairs_to_halves_solution)


# %% [markdown]
# Is it correct? The attention scores decide. Rotate pairs with Meta's weights and halves with the
# converted weights: the dot products of queries and keys must be the same at every distance.

# %%
from xtrain.kernels.rope import rope_ref, rope_tables

rng = np.random.default_rng(0)
H, D, C, T = 2, 8, 16, 6
x = rng.standard_normal((T, C)).astype(np.float32)
wq, wk = (rng.standard_normal((H * D, C)).astype(np.float32) for _ in range(2))
cos, sin = rope_tables(D, T, 100.0)


def rotate_pairs(v):
    y, a, b = v.copy(), v[..., 0::2], v[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    y[..., 0::2], y[..., 1::2] = a * c - b * s, b * c + a * s
    return y


rotate_halves = lambda v: rope_ref(v, cos, sin, np.arange(T))
heads = lambda w: (x @ w.T).reshape(T, H, D)
scores = lambda q, k: np.einsum("thd,shd->hts", q, k)
meta = scores(rotate_pairs(heads(wq)), rotate_pairs(heads(wk)))
converted = scores(
    rotate_halves(heads(pairs_to_halves(wq, H))), rotate_halves(heads(pairs_to_halves(wk, H)))
)
unconverted = scores(rotate_halves(heads(wq)), rotate_halves(heads(wk)))
print("converted:   the same scores:", np.allclose(meta, converted, atol=1e-4))
print(
    "unconverted: the same scores:",
    np.allclose(meta, unconverted, atol=1e-4),
    "- on the diagonal:",
    np.allclose(np.einsum("htt->ht", meta), np.einsum("htt->ht", unconverted), atol=1e-4),
)

# %% [markdown]
# The last line shows why this mistake is hard to see. The score of a token with *itself* is right,
# and the scores with nearby tokens are nearly right, so such a model seems to work for a few words.
#
# ## Where do two implementations diverge?
#
# Loading without an error proves nothing. Run the same tokens through both implementations, record
# the output of every stage, and compare *in the order of the forward pass*. The first stage that
# differs by more than rounding contains the mistake; all later stages inherit it.
#
# ## Exercise 22.3: the first divergence


# %% tags=["exercise"]
def first_parting(ours, theirs, tolerance):
    """-> name of the first stage that differs by more than tolerance, or None.

    The difference of a stage is its largest |ours - theirs| over its largest |theirs|. ours,
    theirs: {stage: array}, in the order of the forward pass. A NaN counts as a difference.
    """
    # YOUR CODE


# %%
lesson.check("22.3", first_parting)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute `difference = np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()`. Every
# comparison with NaN is False, so test for the opposite: `not difference <= tolerance`.
#
# </details>


# %% tags=["solution"]
# Solution 22.3
def first_parting_solution(ours, theirs, tolerance):
    """-> name of the first stage that differs by more than tolerance, or None.

    The difference of a stage is its largest |ours - theirs| over its largest |theirs|. ours,
    theirs: {stage: array}, in the order of the forward pass. A NaN counts as a difference.
    """
    for name in theirs:
        difference = np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()
        if not difference <= tolerance:
            return name
    return None


first_parting = lesson.yours(first_parting, first_parting_solution)


# %% [markdown]
# The next cell plants five common mistakes in the weights or the configuration of our small model.
# The tool names the stage, and the stage almost names the mistake:

# %%
from xtrain.inspect.compare import stages

ids = rng.integers(0, 96, (2, 12))
right = stages(model, ids)


def broken(change=None, **other):
    import dataclasses

    wrong = xtrain.Transformer(dataclasses.replace(config, **other), seed=0, device="cpu")
    if change:
        change({name: p.data for name, p in wrong.named_parameters()})
    return stages(wrong, ids)


def swap_gate_and_up(w):
    for i in range(2):
        gate, up = (w[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        gate[...], up[...] = up.copy(), gate.copy()


def interleaved_keys(w):
    for i in range(2):
        k = w[f"model.layers.{i}.self_attn.k_proj.weight"]
        k[...] = pairs_to_halves(k, 2)


def last_norm(w):
    w["model.norm.weight"][...] *= 1.01


cases = {
    "gate and up swapped": broken(swap_gate_and_up),
    "key rows in another order": broken(interleaved_keys),
    "rope_theta 500000 instead of 10000": broken(rope_theta=500000.0),
    "norm_eps 1e-5 instead of 1e-6": broken(norm_eps=1e-5),
    "last norm's weight off by 1 %": broken(last_norm),
}
for name, ours in cases.items():
    loss = abs(float(ours["loss"]) - float(right["loss"]))
    print(
        f"{name:36} diverges at {first_parting(ours, right, 1e-4)!s:18} loss difference "
        f"{'< 0.1' if loss < 0.1 else '>= 0.1'}"
    )

# %% [markdown]
# The loss would not have revealed any of them. `python -m xtrain.compare FOLDER` makes this
# comparison with transformers.
#
# ## A round trip through another library
#
# If transformers is installed, the next cell does the round trip: load our folder there, compare
# stage by stage, generate greedily with both, save there, and load the result here.

# %%
try:
    import torch
    import transformers  # noqa: F401
except ImportError:
    print(
        "transformers is not installed: run pip install torch transformers, then run this cell "
        "again"
    )
else:
    from xtrain.inspect.compare import load_transformers, stages_of_transformers

    other = load_transformers(folder)
    theirs = stages_of_transformers(other, ids)
    print(
        "first divergence above 1e-5:", first_parting({k: right[k] for k in theirs}, theirs, 1e-5)
    )
    with torch.no_grad():
        text = other.generate(
            torch.tensor(ids[:1, :4]),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    mine = model.generate(ids[:1, :4], 20)
    print("20 tokens, the same as from transformers:", text.numpy().tolist() == mine.tolist())
    other.save_pretrained(folder / "back")
    back = xtrain.Transformer.from_pretrained(folder / "back")
    print(
        "weights after the round trip bitwise equal:",
        all(
            np.array_equal(a.data, b.data)
            for (_, a), (_, b) in zip(model.named_parameters(), back.named_parameters())
        ),
    )

# %% [markdown]
# ## Measure, and one improvement
#
# How much copying does an export cost? In xtrain the queries, keys and values of a layer are one
# matrix (one product instead of three, lesson 4), and so are gate and up. Must they be split on
# export? No: **they are row blocks of one storage, and every Hugging Face tensor is a view**.

# %%
views = copies = 0
for _, p in model.named_parameters():
    inside = np.shares_memory(p.data, model.arena.weights) and p.data.flags.c_contiguous
    views, copies = views + inside, copies + (not inside)
print(f"{views} tensors are contiguous views of the arena, {copies} would have to be copied")

# %% [markdown]
# The rows of the two packed matrices of a layer, in the order in which they are in memory (each row
# has C = 32 numbers). Hugging Face's names are ranges of rows, so nothing moves on export:

# %%
c = model.config
q, kv, F = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_dim
lesson.figures.timeline(
    {
        "qkv": [(0, q, "q_proj"), (q, q + kv, "k_proj"), (q + kv, q + 2 * kv, "v_proj")],
        "gate_up": [(0, F, "gate_proj"), (F, 2 * F, "up_proj")],
    },
    "packed weights: a tensor is a range of rows",
    "row",
    width=lesson.figures.NARROW,
)

# %% [markdown]
# The alternative, packing them column by column, would have made each of them a strided view: one
# copy on every save and another on every load. For a model of 8 billion parameters, 32 GB would be
# moved twice for no benefit. The vocabulary is padded to a multiple of 128 in memory (rows of an odd
# number of elements do not begin at multiples of 16 bytes, and the output head's product cannot use wide accesses). The padding is at the *end*, so the
# exported table is a view too:

# %%
print("rows in memory:", c.padded_vocab_size, " exported:", tensors["lm_head.weight"].shape[0])

# %% [markdown]
# ## The library's kernel
#
# This lesson has no kernel. Instead, look at what the importer refuses: settings that xtrain does
# not support and would therefore compute wrongly:

# %%
from xtrain.formats import architectures

print({k: v[0] for k, v in architectures.ALLOWED.items()})
lesson.source(architectures.config_from_hf)

# %%
for change in ({"hidden_act": "gelu"}, {"attention_bias": True}, {"num_hidden_layers": None}):
    try:
        architectures.config_from_hf({**about, **change})
    except xtrain.UserError as error:
        print(error)

# %% [markdown]
# Your 22.3 exists as a command. This is the part of it that records the output of each stage:

# %%
from xtrain.inspect import compare

lesson.source(compare.stages)

# %% [markdown]
# ## What did not help
#
# *Comparing the generated text.* Greedy texts are equal until two tokens nearly tie; from there on
# they differ, even between two *correct* implementations, because these round differently. So 20
# equal tokens prove little, and a difference proves nothing. Comparing logits with a tolerance does
# prove something.
#
# *Comparing the loss.* See the table above: five mistakes, and five losses that look fine. On an
# untrained model nearly every mistake leaves the loss at ln V:

# %%
import math

print(
    f"ln 96 = {math.log(96):.1f};",
    ", ".join(f"{float(ours['loss']):.1f}" for ours in cases.values()),
)

# %% [markdown]
# ## More exercises
#
# 1. Write `halves_to_pairs`, and check that the two functions are inverses.
# 2. Extend `read_safetensors` to BF16. (NumPy has no such type: read uint16, and shift it into the
#    upper half of a uint32.)
# 3. Plant your own mistake in a copy of the model, and let someone else find it with `python -m
#    xtrain.compare`.
#
# <details><summary>Solutions</summary>
#
# 1: `w.reshape(H, 2, -1, C).transpose(0, 2, 1, 3).reshape(-1, C)`. 2: `(np.frombuffer(raw,
# np.uint16).astype(np.uint32) << 16).view(np.float32)`.
#
# </details>
#
# ## Sources
#
# - Hugging Face, *safetensors*: the file format.
# - Hugging Face transformers, `convert_llama_weights_to_hf.py`: `permute` is our 22.2.
# - J. Su et al., *RoFormer*, 2021.
