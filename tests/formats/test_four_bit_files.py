"""Folders of AutoGPTQ and AutoAWQ: packed here number by number, as their papers' code does, and read as the matrices."""

import json

import numpy as np
import pytest
from checks import rng
from safetensors.numpy import load_file, save_file
from twins import random_model, small

from xtrain import Transformer
from xtrain.errors import UserError
from xtrain.formats.huggingface import save

CONFIG = small(dim=64, hidden_dim=96, head_dim=16, n_kv_heads=2, qk_norm=False)
SIZE = 32  # columns of a group
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def word(nibbles):
    """-> int32 of 8 nibbles, the lowest first"""
    return np.uint32(sum(int(c) << 4 * j for j, c in enumerate(nibbles))).astype(np.int32)


def pack_gptq(codes_OK, zeros_OG, v2):
    O, K = codes_OK.shape  # noqa: E741
    qweight, qzeros = (
        np.zeros((K // 8, O), np.int32),
        np.zeros((zeros_OG.shape[1], O // 8), np.int32),
    )
    for i in range(K // 8):
        for o in range(O):
            qweight[i, o] = word(codes_OK[o, 8 * i : 8 * i + 8])
    for g in range(zeros_OG.shape[1]):
        for i in range(O // 8):
            qzeros[g, i] = word(zeros_OG[8 * i : 8 * i + 8, g] - (0 if v2 else 1) & 15)
    return qweight, qzeros


def pack_awq(codes_OK, zeros_OG):
    def columns(x_KO):
        packed = np.zeros((x_KO.shape[0], x_KO.shape[1] // 8), np.int32)
        for k in range(x_KO.shape[0]):
            for i in range(packed.shape[1]):
                packed[k, i] = word([x_KO[k, 8 * i + column] for column in AWQ_ORDER])
        return packed

    return columns(codes_OK.T), columns(zeros_OG.T)


def folder_of(path, method, act_order=False, **changes):
    """A folder whose matrices are random codes -> {name: the matrix}"""
    save(random_model(CONFIG, device="cpu"), path)
    tensors, expected = load_file(path / "model.safetensors"), {}
    for i, name in enumerate(sorted(tensors)):
        if not name.endswith("_proj.weight"):
            continue
        O, K = tensors.pop(name).shape  # noqa: E741
        draw = rng(3, i)
        size = K if changes.get("group_size") == -1 else SIZE
        codes, zeros = draw.integers(0, 16, (O, K)), draw.integers(0, 16, (O, K // size))
        scales = draw.uniform(0.005, 0.02, (K // size, O)).astype(np.float16)
        group = np.arange(K) // size
        if act_order:
            group = draw.permutation(group)
        expected[name] = (codes - zeros[:, group]).astype(np.float32) * scales.T.astype(np.float32)[
            :, group
        ]
        v2 = "gptq_v2" in (changes.get("checkpoint_format"), changes.get("format"))
        packed = pack_awq(codes, zeros) if method == "awq" else pack_gptq(codes, zeros, v2)
        module = name.removesuffix("weight")
        parts = dict(zip(("qweight", "qzeros"), packed), scales=scales)
        if method == "gptq":
            parts["g_idx"] = group.astype(np.int32)
        tensors |= {module + part: x for part, x in parts.items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": SIZE,
    } | changes
    (path / "config.json").write_text(json.dumps(config))
    (path / "manifest.json").unlink(missing_ok=True)
    return expected


KINDS = {
    "gptq": ("gptq", {}),
    "gptq, order of activations": ("gptq", dict(act_order=True)),
    "gptq v2": ("gptq", dict(checkpoint_format="gptq_v2")),
    "gptq v2 of newer files": ("gptq", dict(format="gptq_v2", desc_act=True)),
    "gptq, the older key wins": ("gptq", dict(checkpoint_format="gptq_v2", format="gptq")),
    "gptq, one group": ("gptq", dict(group_size=-1)),
    "awq": ("awq", dict(version="gemm")),
    "awq of newer files": ("awq", dict(checkpoint_format="gemm", format="GEMM")),
    "awq, one group": ("awq", dict(version="GEMM", group_size=-1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix(tmp_path, kind):
    method, options = KINDS[kind]
    expected = folder_of(tmp_path, method, **options)
    model = Transformer.from_pretrained(tmp_path, "cpu")
    found = {name: tensor.numpy() for name, tensor in model.named_parameters()}
    assert len(expected) == 14
    for name, matrix in expected.items():
        assert np.array_equal(found[name], matrix), name
    save(model, tmp_path / "plain")
    plain = Transformer.from_pretrained(tmp_path / "plain", "cpu")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters()):
        assert np.array_equal(a.numpy(), b.numpy()), name


@pytest.mark.parametrize(
    "method, changes, words",
    [
        ("gptq", {"bits": 3}, r"quantized \(gptq\) with bits 3, xtrain reads 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "format 'marlin', xtrain reads 'gptq' or 'gptq_v2'"),
        ("gptq", {"format": "bitblas"}, r"quantized \(gptq\) with format 'bitblas'"),
        ("awq", {"version": "gemv"}, r"quantized \(awq\) with format 'gemv'"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "format 'gemv_fast', xtrain reads 'gemm'"),
        ("awq", {"format": "llm-awq"}, "format 'llm-awq'"),
        ("awq", {"zero_point": False}, "zero_point False, xtrain reads True"),
        *(("gptq", {"quant_method": x}, rf"quantized \({x}\), which xtrain does not read") for x in
          ("compressed-tensors", "bitsandbytes", "hqq", "fp8", "torchao", "mxfp4")),
        ("gptq", {"quant_method": ["gptq"]}, r"quantized \(\['gptq'\]\)"),
        ("awq", {"group_size": 64}, "group_size 64 gives others for 96 columns"),
        ("awq", {"group_size": "x"}, "group_size 'x' gives others"),
    ],
)  # fmt: skip
def test_refused(tmp_path, method, changes, words):
    folder_of(tmp_path, method, **changes)
    with pytest.raises(UserError, match=words):
        Transformer.from_pretrained(tmp_path, "cpu")


@pytest.mark.parametrize(
    "part, words",
    [
        ("qzeros", "lacks .*q_proj.qzeros"),
        ("scales", "lacks .*q_proj.scales"),
        ("qweight", "no qweight next to it"),
    ],
)
def test_missing_tensors(tmp_path, part, words):
    folder_of(tmp_path, "awq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.0.self_attn.q_proj.{part}"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=words):
        Transformer.from_pretrained(tmp_path, "cpu")


def test_order_of_activations_without_its_groups(tmp_path):
    folder_of(tmp_path, "gptq", act_order=True, desc_act=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if not name.endswith("g_idx")}, file)
    with pytest.raises(UserError, match=r"lacks .*g_idx"):
        Transformer.from_pretrained(tmp_path, "cpu")


def test_biases_of_zeros_are_read_and_others_refused(tmp_path):
    """AutoGPTQ wrote a bias for each matrix, also if the model has none."""
    expected = folder_of(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, matrix in expected.items():
        tensors[name.replace("weight", "bias")] = np.zeros(len(matrix), np.float16)
    save_file(tensors, file)
    model = Transformer.from_pretrained(tmp_path, "cpu")
    found = {name: tensor.numpy() for name, tensor in model.named_parameters()}
    assert all(np.array_equal(found[name], matrix) for name, matrix in expected.items())
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"unexpected tensors: '?model\.layers\.0\.mlp\.up_proj\.bias"
    ):
        Transformer.from_pretrained(tmp_path, "cpu")


def test_damaged(tmp_path):
    folder_of(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.g_idx"][3] = 99
    save_file(tensors, file)
    with pytest.raises(UserError, match="is damaged: g_idx"):
        Transformer.from_pretrained(tmp_path, "cpu")
    tensors["model.layers.0.self_attn.q_proj.qzeros"] = tensors[
        "model.layers.0.self_attn.q_proj.qzeros"
    ][:1]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"qzeros of shape .* does not fit"):
        Transformer.from_pretrained(tmp_path, "cpu")


def test_whole_numbers_elsewhere_are_refused(tmp_path):
    save(random_model(CONFIG, device="cpu"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, file)
    with pytest.raises(UserError, match="is stored as I32"):
        Transformer.from_pretrained(tmp_path, "cpu")
