"""The smallest proof that everything works together: a model learns one sequence by heart."""

import numpy as np
from checks import rng, to_host
from twins import DEVICE

from xtrain import AdamW, ModelConfig, Transformer


def test_27_of_27_tokens():
    shape = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=32)
    model = Transformer(ModelConfig(vocab_size=50, **shape), seed=0, device=DEVICE)
    optimizer = AdamW(model, lr=1e-2, weight_decay=0.0)
    text = rng(0).integers(0, 50, (1, 28))
    ids, targets = text[:, :-1], text[:, 1:]
    right = lambda: int((to_host(model(ids).data).argmax(-1) == targets).sum())
    assert right() < 10
    for _ in range(100):
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.step()
    assert right() == 27 and loss.item() < 0.1
    # and it says the sequence by itself, from the first token
    assert np.array_equal(model.generate(text[:, :1], 27), text)
