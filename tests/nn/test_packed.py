"""Several documents in a row: the loss and the gradients of each document alone."""

import itertools

import numpy as np
import pytest
from checks import GPU, rng, to_host
from flash_attention_cases import small_tiles
from twins import GEMMA3, LLAMA3, gradients, random_model, small

from xtrain import Transformer
from xtrain.device import to_device
from xtrain.errors import UserError
from xtrain.nn.autograd import no_grad

LENGTHS = [[7, 1, 12, 20], [40], [33, 7]]  # of the documents in each row
T = 40
CONFIGS = {
    "all features": dict(qk_norm=True, tie_embeddings=True, qkv_bias=True),
    "windows": dict(n_layers=3, sliding_window=5, full_attention_layers=(1,), qk_norm=False),
    "gemma3": dict(GEMMA3, full_attention_layers=(1,)),
    "layers without RoPE": dict(no_rope_layers=(1,), rope_scaling=LLAMA3),
}


def rows(vocab_size, lengths=LENGTHS, T=T):
    """-> ids, targets, starts (B, T); the target of each document's last token is ignored."""
    draw = rng(7)
    ids = draw.integers(0, vocab_size, (len(lengths), T)).astype(np.int32)
    targets = np.roll(ids, -1, axis=1)
    starts = np.stack([np.repeat(np.cumsum([0, *ns[:-1]]), ns) for ns in lengths]).astype(np.int32)
    targets[np.roll(starts, -1, axis=1) != starts] = -100
    targets[:, -1] = -100
    return ids, targets, starts


def documents(ids, targets, starts):
    """-> (row, first column, ids (1, n), targets (1, n)) of each document"""
    for b in range(len(ids)):
        edges = [*np.unique(starts[b]), ids.shape[1]]
        for a, e in itertools.pairwise(edges):
            yield b, a, ids[b : b + 1, a:e], targets[b : b + 1, a:e]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_are_documents_alone(changes, recompute):
    model = random_model(small(**changes))
    model.recompute = recompute
    ids, targets, starts = rows(model.config.vocab_size)
    count = (targets != -100).sum()
    alone = 0.0
    for _, _, x, y in documents(ids, targets, starts):
        if (y != -100).any():
            loss = model.loss(x, y) * float((y != -100).sum() / count)
            loss.backward()
            alone += loss.item()
    want = gradients(model)
    model.zero_grad()
    loss = model.loss(ids, targets, starts=starts)
    loss.backward()
    assert abs(loss.item() - alone) < 1e-6 * abs(alone)
    for name, found in gradients(model).items():
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(found, want[name], rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    with no_grad():  # the test would notice a leak
        leaking = model.loss(ids, targets).item()
    assert abs(leaking - alone) > 3e-4 * abs(alone)


def test_nothing_of_another_document_reaches_a_row():
    """Bit for bit: other tokens in the other documents change no logit of this one."""
    model = random_model(small())
    ids, _, starts = rows(model.config.vocab_size)
    other = ids.copy()
    mine = starts == 8  # the third document of the first row
    mine[1:] = False
    other[~mine] = (other[~mine] + 1) % model.config.vocab_size
    a, b = (
        to_host(model.hidden(x, model.packed_sequences(starts, x.shape)).data).reshape(*x.shape, -1)
        for x in (ids, other)
    )
    assert np.array_equal(a[mine], b[mine]) and not np.array_equal(a[~mine], b[~mine])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@small_tiles()
def test_kernels(precision):
    """The model's forward and backward in the simulator, or on a GPU, against the fp32 references."""
    lengths = [[100, 30, 1, 69], [17, 183]] if GPU else [[3, 9], [12]]
    length = sum(lengths[0])
    shape = dict(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=16)
    config = small(vocab_size=21, max_seq_len=length, sliding_window=length // 3, **shape)
    ids, targets, starts = rows(21, lengths, length)
    reference = random_model(config, device="cpu")
    kernels = Transformer(config, None, "gpu" if GPU else "sim", precision)
    for (_, mine), (_, theirs) in zip(kernels.named_parameters(), reference.named_parameters()):
        mine.data = to_device(theirs.data, kernels.device)
    losses = [model.loss(ids, targets, starts=starts) for model in (reference, kernels)]
    for loss in losses:
        loss.backward()
    near = 1e-5 if precision == "fp32" else 3e-2  # bf16 on an H200: 0.0225 with both compilers
    assert abs(losses[0].item() - losses[1].item()) < near * losses[0].item()
    found, want = gradients(kernels), gradients(reference)
    for name in want:
        error = np.linalg.norm(found[name] - want[name]) / np.linalg.norm(want[name])
        assert error < near, (name, error)


def test_what_is_refused():
    model = random_model(small())
    ids, targets, starts = rows(model.config.vocab_size)
    for bad, words in (
        (starts[:2], "give whole numbers of that shape"),
        (starts.astype(np.float32), "give whole numbers of that shape"),
        (starts - 1, "must not decrease"),
        (starts[:, ::-1], "must not decrease"),
        (np.maximum(starts, 1), "must lie in 0 .. t"),
    ):
        with pytest.raises(UserError, match=words):
            model.loss(ids, targets, starts=np.ascontiguousarray(bad))
    dynamic = dict(rope_type="dynamic", factor=2.0)
    model = random_model(small(max_seq_len=20, rope_scaling=dynamic))
    with pytest.raises(UserError, match="give shorter rows"):
        model.loss(ids, targets, starts=starts)
    assert np.isfinite(model.loss(ids[:, :20], targets[:, :20], starts=starts[:, :20]).item())
