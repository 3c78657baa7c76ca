"""The kernels that the engine launches for a model of real width compile without a GPU, with the types of its arrays."""

import functools

from offline import CARDS_BF16, compiled, nvvm, signatures
from twins import small

from xtrain import Engine, Transformer

__all__ = ["nvvm"]
# One layer of a Llama of 1.1 B parameters; the size of the vocabulary does not matter.
SHAPE = dict(dim=2048, n_heads=32, n_kv_heads=4, head_dim=64, hidden_dim=5632, qk_norm=False)


def serve(slots):
    """Two steps of an engine whose kernels do nothing. The ids are uninitialized memory and are not checked."""
    config = small(n_layers=1, vocab_size=256, max_seq_len=512, **SHAPE)
    model = Transformer(config, None, "sim", "bf16", trainable=False)
    engine = Engine(model, slots, 300)
    options = dict(top_k=5, top_p=0.9, min_p=0.1, presence_penalty=0.1, logprobs=2)
    engine.generate([[1, 2, 3], *[[4]] * (slots - 1)], 2, temperature=1.0, **options)


def test_the_kernels_of_the_engine_compile(monkeypatch, nvvm):
    found = {}
    for slots in (1, 12):
        found |= dict.fromkeys(signatures(monkeypatch, functools.partial(serve, slots)))
    names = {kernel.py_func.__name__ for kernel, _ in found}
    assert {"decode_attention_kernel", "gemv_tensor_kernel", "append_kv_kernel"} <= names
    assert {"sample_draw_kernel", "count_tokens_kernel", "top_list_kernel"} <= names
    assert {"residual_rmsnorm_fwd_kernel", "swiglu_fwd_kernel"} <= names  # 12 sequences use GEMMs
    for kernel, signature in found:
        arrays = [t for t in signature if hasattr(t, "layout")]
        assert all(t.layout == "C" for t in arrays), kernel.py_func.__name__
        compiled(monkeypatch, kernel, signature, CARDS_BF16)
