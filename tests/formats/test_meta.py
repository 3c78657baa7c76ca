"""A Llama of transformers, rewritten in Meta's format and converted back: identical logits."""

import errno
import io
import json
import os
import pickle
import warnings
import zipfile

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from twins import LLAMA3, batch, random_model, small, twin

from xtrain import Transformer, UserError
from xtrain.convert_meta import main
from xtrain.formats import meta as convert_meta
from xtrain.formats.meta import (
    Options,
    halves_from_pairs,
    make_tensors,
    read_config,
    read_shards,
)

NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ROWS = ("wq", "wk", "wv", "w1", "w3", "output")


def config(**changes):
    shape = dict(
        n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=40, vocab_size=64, max_seq_len=4096
    )
    return small(qk_norm=False, norm_eps=1e-5, **(shape | changes))


def pairs_from_halves(w, heads):
    """Row i D/2 + r of a head goes to row 2r + i, one row at a time: independent of the code under test."""
    D = len(w) // heads
    out = torch.empty_like(w)
    for h in range(heads):
        for r in range(D // 2):
            for i in (0, 1):
                out[h * D + 2 * r + i] = w[h * D + i * D // 2 + r]
    return out


def meta_state(other, c):
    state = {}
    for name, tensor in other.state_dict().items():
        name, tensor = name.removeprefix("model.").removesuffix(".weight"), tensor.detach()
        if name.endswith(("q_proj", "k_proj")):
            tensor = pairs_from_halves(tensor, c.n_heads if "q_proj" in name else c.n_kv_heads)
        if name.startswith("layers."):
            _, i, rest = name.split(".", 2)
            name = f"layers.{i}.{NAMES[rest]}"
        name = {"embed_tokens": "tok_embeddings", "lm_head": "output"}.get(name, name)
        state[name + ".weight"] = tensor.clone()
    return state


def cut(name, tensor, n, table_axis):
    if tensor.ndim == 1:
        return [tensor] * n
    axis = table_axis if "tok_emb" in name else 0 if name.split(".")[-2] in ROWS else 1
    return [shard.clone() for shard in tensor.chunk(n, axis)]


def write_meta(folder, state, c, n=1, table_axis=0, **params):
    folder.mkdir(exist_ok=True)
    cuts = {name: cut(name, tensor, n, table_axis) for name, tensor in state.items()}
    for i in range(n):
        shard = {name: shards[i] for name, shards in cuts.items()}
        shard["rope.freqs"] = torch.ones(4)
        torch.save(shard, folder / f"consolidated.{i:02d}.pth")
    content = dict(
        dim=c.dim, n_layers=c.n_layers, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, vocab_size=-1,
        multiple_of=256, norm_eps=c.norm_eps, rope_theta=c.rope_theta,
    )  # fmt: skip
    (folder / "params.json").write_text(json.dumps(content | params))


@pytest.fixture
def meta(tmp_path):
    c = config()
    other = twin(random_model(c, device="cpu"))
    write_meta(tmp_path / "meta", meta_state(other, c), c)
    return tmp_path / "meta"


CASES = {
    "one file": (1, 0, {}),
    "two files, Llama 3": (2, 0, {}),
    "two files, Llama 2": (2, 1, {}),
    "tied": (1, 0, dict(tie_embeddings=True)),
    "no groups": (2, 1, dict(n_kv_heads=4)),
}


@pytest.mark.parametrize("n, table_axis, changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_logits(n, table_axis, changes, dtype, tmp_path):
    c = config(**changes)
    other = twin(random_model(c, device="cpu"))
    for p in other.parameters():
        p.data = p.data.to(dtype).float()
    state = {name: tensor.to(dtype) for name, tensor in meta_state(other, c).items()}
    write_meta(tmp_path / "meta", state, c, n, table_axis)
    assert main([str(tmp_path / "meta"), str(tmp_path / "hf")]) == 0
    hf = tmp_path / "hf"
    assert transformers.AutoConfig.from_pretrained(hf).dtype == dtype
    assert all(tensor.dtype == dtype for tensor in load_file(hf / "model.safetensors").values())
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        hf, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    ids, _ = batch(c, 2, 9)
    with torch.no_grad():
        expected, got = (m(torch.from_numpy(ids)).logits for m in (other, back.eval()))
    assert torch.equal(expected, got)
    ours = Transformer.from_pretrained(hf)
    assert ours.config == c
    assert np.abs(ours(ids).data - expected.numpy()).max() < 1e-4


def test_more_files_than_key_heads(tmp_path):
    """Meta's largest models: each key head is in two files."""
    c = config(n_kv_heads=2)
    other = twin(random_model(c, device="cpu"))
    state = meta_state(other, c)
    write_meta(tmp_path / "meta", state, c, 4)
    for i in range(4):
        file = tmp_path / "meta" / f"consolidated.{i:02d}.pth"
        shard = torch.load(file)
        for name in state:
            if "wk" in name or "wv" in name:
                shard[name] = state[name].chunk(2)[i // 2].clone()
        torch.save(shard, file)
    assert main([str(tmp_path / "meta"), str(tmp_path / "hf")]) == 0
    ids, _ = batch(c, 1, 9)
    ours = Transformer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = other(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(ours(ids).data - expected).max() < 1e-4


def test_scaled_rope_shards_and_the_tokenizer(meta, tmp_path, monkeypatch, capsys):
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")  # fmt: skip
    for name in files:
        (meta / name).write_text("{}")
    monkeypatch.setattr(convert_meta, "MAX_SHARD_BYTES", 10_000)
    assert main([str(meta), str(tmp_path / "hf"), "--rope-factor", "8", "--max-seq-len", "48"]) == 0
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    assert all((tmp_path / "hf" / name).read_text() == "{}" for name in files)
    model = Transformer.from_pretrained(tmp_path / "hf")
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    assert model.config == config(rope_scaling=scaling, max_seq_len=48)
    assert "no tokenizer.json" not in capsys.readouterr().out


def test_the_rotation_of_pairs_is_undone():
    w = np.arange(24).reshape(12, 2)
    back = halves_from_pairs(pairs_from_halves(torch.from_numpy(w), 2).numpy(), 2)
    assert np.array_equal(back, w)


# ----------------------------------------------------------------------------- damage
def refused(capsys, meta, *words, more=()):
    target = meta.parent / "refused"
    assert main([str(meta), str(target), *more]) == 2
    message = capsys.readouterr().err
    assert message.startswith("xtrain.convert_meta: ") and message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not target.exists() and not list(meta.parent.glob(".refused*"))


def test_folders_without_a_checkpoint(meta, capsys, tmp_path):
    refused(capsys, tmp_path / "none", "is not a folder")
    (meta / "consolidated.00.pth").rename(meta / "consolidated.01.pth")
    refused(capsys, meta, "without a gap, it has: consolidated.01.pth")
    (meta / "consolidated.01.pth").unlink()
    os.mkfifo(meta / "consolidated.00.pth")  # a pipe: reading it would block
    refused(capsys, meta, "without a gap, it has: ")
    (meta / "consolidated.00.pth").unlink()
    refused(capsys, meta, "it has: none")
    (meta / "params.json").unlink()
    refused(capsys, meta, "has no params.json")


def test_names_that_cannot_be_folders(meta, capsys, tmp_path, monkeypatch):
    """An empty name would mean the current folder, and replace its weights."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for names, words in (
        ([str(meta), ""], "the name of a folder is empty"),
        (["", "target"], "the name of a folder is empty"),
        (["x" * 300, "target"], "cannot be read: File name too long"),
        ([str(meta), "/"], "the root of the disk"),
    ):
        assert main(names) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_without_read_permission(meta, capsys, monkeypatch):
    def denied(file, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(torch, "load", denied)
    refused(capsys, meta, "consolidated.00.pth cannot be read: Permission denied")


def test_invalid_options(meta, capsys):
    refused(capsys, meta, "--max-seq-len 0 must be", more=["--max-seq-len", "0"])
    refused(capsys, meta, "--rope-factor 8.0", "no use_scaled_rope", more=["--rope-factor", "8"])
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    refused(capsys, meta, "factor", more=["--rope-factor", "0"])


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/never", "w"))


def test_files_with_code_or_damage(meta, capsys):
    file = meta / "consolidated.00.pth"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    refused(capsys, meta, "consolidated.00.pth is damaged")
    file.write_bytes(pickle.dumps(Evil()))
    refused(capsys, meta, "damaged or holds more than weights")
    torch.save({"x": Evil()}, file)
    refused(capsys, meta, "damaged or holds more than weights")
    torch.save({"x": [1, 2]}, file)
    refused(capsys, meta, "must hold tensors by name")


CHANGES = {
    "lacks dim": ({"dim": None}, "lacks dim"),
    "layers": ({"n_layers": 2**30}, "n_layers 1073741824"),
    "fewer layers": ({"n_layers": 1}, "unexpected tensors: layers.1."),
    "more layers": ({"n_layers": 4}, "num"),
    "heads": ({"n_heads": 3}, "not divisible"),
    "other heads": ({"n_heads": 8, "n_kv_heads": 8}, "attention.wk.weight: shards of shapes"),
    "text": ({"dim": "wide"}, "cannot be used"),
    "mixture of experts": ({"moe": {}}, "needs moe"),
}


@pytest.mark.parametrize("changes, words", CHANGES.values(), ids=CHANGES)
def test_params_that_do_not_fit(meta, capsys, changes, words):
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | changes))
    if words == "num":
        words = "the files hold only 21 tensors"
    refused(capsys, meta, words)


def test_tensors_that_do_not_fit(meta, capsys):
    file = meta / "consolidated.00.pth"
    state = torch.load(file)
    torch.save(state | {"extra": torch.zeros(1)}, file)
    refused(capsys, meta, "unexpected tensors: extra")
    torch.save({k: v for k, v in state.items() if k != "norm.weight"}, file)
    refused(capsys, meta, "missing tensors: norm.weight")
    torch.save(state | {"norm.weight": torch.zeros(3)}, file)
    refused(capsys, meta, "norm.weight: shards of shapes (3,) do not make up (32,)")
    torch.save(state | {"norm.weight": torch.zeros(32, dtype=torch.int8)}, file)
    refused(capsys, meta, "norm.weight is stored as int8")
    torch.save(state, file)
    torch.save({"other": torch.zeros(1)}, meta / "consolidated.01.pth")
    refused(capsys, meta, "hold different tensors")


# ----------------------------------------------------------------------------- unusual content
def test_a_changed_bit_is_refused_or_changes_nothing(tmp_path, capsys):
    """torch.load ignores the checksums of the archive. Of 60 flipped bits, 59 changed the weights silently."""
    c = config(n_layers=1, dim=16, n_heads=2, n_kv_heads=1, vocab_size=16, hidden_dim=16)
    write_meta(tmp_path / "meta", meta_state(twin(random_model(c, device="cpu")), c), c)
    file = tmp_path / "meta" / "consolidated.00.pth"
    good = file.read_bytes()
    expected = [(k, v.clone()) for k, v in read_shards(file.parent)[0].items()]
    refusals = 0

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, len(good) * 8 - 1))
    def flip(bit):
        nonlocal refusals
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        file.unlink()  # the previous one may still be mapped
        file.write_bytes(damaged)
        try:
            found = read_shards(file.parent)[0]
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error) and file.name in str(error)
        else:
            assert [k for k, _ in expected] == list(found)
            assert all(torch.equal(v, found[k]) for k, v in expected)

    flip()
    assert refusals > 100
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("data/0"))
    at = good.index(entry.filename.encode()) + len(entry.filename) + 70  # within its values
    file.unlink()
    file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    refused(capsys, tmp_path / "meta", "Bad CRC-32")


def test_archives_that_torch_does_not_write(meta, capsys):
    """Memory-mapped, compressed entries would be read as weights."""
    file = meta / "consolidated.00.pth"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    refused(capsys, meta, "damaged", "compress")
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in [*entries.items(), *list(entries.items())[:1]]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                archive.writestr(name, content)
    refused(capsys, meta, "damaged", "two entries have the same name")


@pytest.mark.parametrize("version, good", [("2.5.1+cu124", 0), ("1.13", 0), ("2.6.0a0+git1", 1), ("3.0", 1)])  # fmt: skip
def test_versions_of_torch(version, good, meta, capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    if good:
        assert main([str(meta), str(meta.parent / "hf")]) == 0
    else:
        refused(capsys, meta, f"PyTorch {version} may run code", "install version 2.6 or later")


NORM, WQ, TABLE = "norm.weight", "layers.0.attention.wq.weight", "tok_embeddings.weight"
GATE = "layers.0.feed_forward.w1.weight"


def as_parameter(w):
    return torch.nn.Parameter(w)


def as_negative_view(w):
    return torch.complex(torch.zeros_like(w), -w).conj().imag


# What a name may hold instead of its ordinary tensor w, with the same values.
SAME_VALUES = {
    "transposed storage": lambda w: w.T.contiguous().T if w.ndim == 2 else w,
    "part of a storage": lambda w: torch.cat([w, w])[len(w) :],
    "every second": lambda w: torch.stack([w, w], -1)[..., 1],
    "parameter": as_parameter,
    "negative view": as_negative_view,
}


@pytest.mark.parametrize("change", SAME_VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusual_storages_of_the_same_values(change, dtype, meta, tmp_path):
    if change == "negative view" and dtype != torch.float32:
        pytest.skip("torch has no complex bfloat16")
    file = meta / "consolidated.00.pth"
    state = {k: v.to(dtype) for k, v in torch.load(file).items()}
    torch.save(state, file)
    assert main([str(meta), str(tmp_path / "plain")]) == 0
    torch.save({k: SAME_VALUES[change](v) for k, v in state.items()}, file)
    assert main([str(meta), str(tmp_path / "unusual")]) == 0
    plain, unusual = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "unusual")
    )
    assert plain == unusual


def test_shared_storages(meta, tmp_path):
    file = meta / "consolidated.00.pth"
    state = torch.load(file)
    shared = state | {"output.weight": state[TABLE]}
    torch.save(shared, file)
    assert main([str(meta), str(tmp_path / "hf")]) == 0
    assert Transformer.from_pretrained(tmp_path / "hf").config.tie_embeddings
    one = state[GATE]
    torch.save(state | {GATE: one, GATE.replace("w1", "w3"): one}, file)
    assert main([str(meta), str(tmp_path / "two")]) == 0
    weights = load_file(tmp_path / "two" / "model.safetensors")
    assert torch.equal(
        weights["model.layers.0.mlp.gate_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    )


def quantized(w):
    return torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)


UNUSUAL = {
    "no dimension": lambda w: torch.tensor(1.0),
    "one dimension": lambda w: w.reshape(-1),
    "three dimensions": lambda w: w[None, None],
    "empty": lambda w: w[:0],
    "no elements": lambda w: torch.zeros(0),
    "int8": lambda w: w.to(torch.int8),
    "bool": lambda w: w > 0,
    "float64": lambda w: w.double(),
    "float8": lambda w: w.to(torch.float8_e4m3fn),
    "complex": lambda w: w.to(torch.complex64),
    "quantized": quantized,
    "sparse": lambda w: w.to_sparse(),
    "no values": lambda w: w.to("meta"),
    "one value for all": lambda w: torch.zeros(1).expand(w.shape),
    "one value for very many": lambda w: torch.zeros(1).expand(10**9, 10**9),
    "half": lambda w: w.half(),
}


@pytest.mark.parametrize("change", UNUSUAL)
@pytest.mark.filterwarnings("ignore")  # torch: quantization is deprecated
def test_unusual_tensors_are_one_sentence(change, meta, capsys, tmp_path):
    file = meta / "consolidated.00.pth"
    state = torch.load(file)
    names = (NORM, WQ, TABLE, GATE, "output.weight", "layers.1.attention.wv.weight", "layers.1.attention.wo.weight")  # fmt: skip
    for name in names:
        if change in ("one dimension", "three dimensions") and name == NORM:
            continue
        torch.save(state | {name: UNUSUAL[change](state[name])}, file)
        if change == "half":  # one tensor of another supported dtype
            assert main([str(meta), str(tmp_path / name)]) == 0
        else:
            refused(capsys, meta, "")
    if change in ("no dimension", "one dimension", "int8"):  # only in the second file
        torch.save(state, file)
        for name in names[1:]:
            torch.save(state | {name: UNUSUAL[change](state[name])}, meta / "consolidated.01.pth")
            refused(capsys, meta, "")


VALUES = st.sampled_from(
    [None, True, 0, -1, 1, 2, 3, 4, 8, 32, 2**31, 2**70, 0.5, 1e400, -1e-9, "", "4", [], [1], {}, {"a": 1}]
)  # fmt: skip
KEYS = st.sampled_from(
    ["dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor",
     "rope_high_freq_factor", "moe", "vocab_size"]
)  # fmt: skip


def test_any_params_are_one_sentence_or_work(tmp_path):
    c = config()
    write_meta(tmp_path, meta_state(twin(random_model(c, device="cpu")), c), c)
    shards, params = read_shards(tmp_path), json.loads((tmp_path / "params.json").read_text())

    @settings(max_examples=300, deadline=None)
    @given(st.dictionaries(KEYS, VALUES, max_size=3), st.sets(KEYS, max_size=2))
    def check(changes, removed):
        content = {k: v for k, v in (params | changes).items() if k not in removed}
        try:
            made = read_config(content, shards, Options(str(tmp_path), "target"))
            make_tensors(made, shards)
        except UserError as error:
            assert "\n" not in str(error)

    check()


def test_a_value_of_zero_is_not_a_missing_one(meta, capsys):
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | {"rope_theta": 0}))
    refused(capsys, meta, "rope_theta must be a positive number")
