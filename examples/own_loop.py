"""A training loop of your own: ten lines instead of xtrain.train.  lessons/howto/own_loop.md explains each call.

python examples/own_loop.py FILE_OR_FOLDER [STEPS]
"""

import sys

import numpy as np

import xtrain
from xtrain.data.dataset import prepare
from xtrain.nn.optim import clip, learning_rate

B, T = 8, 128


def main(data: str, steps: int = 200) -> float:
    # [start:loop]
    corpus = prepare(data, vocab_size=1024)  # trains a tokenizer and writes token shards; cached
    config = xtrain.ModelConfig(
        vocab_size=corpus.vocab_size, dim=128, n_layers=4, n_heads=4, max_seq_len=T
    )
    model = xtrain.Transformer(config, seed=0, device="cpu")
    optimizer = xtrain.AdamW(model, lr=3e-3)
    loader = corpus.loader(B, T, seed=0)
    for step in range(steps):
        ids, targets = loader.next_batch()  # (B, T) each
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        norm, factor = clip(model, max_norm=1.0)
        optimizer.lr = learning_rate(step, steps, peak=3e-3, warmup=20, min_ratio=0.1)
        optimizer.step(factor)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}")
    # [end:loop]
    # [start:use]
    bpb = validate(model, corpus)
    tokenizer = corpus.tokenizer
    prompt = np.array(tokenizer.encode("the"))
    print(f"{bpb:.3f} bits per byte: {tokenizer.decode(model.generate(prompt, 20))!r}")
    model.save_pretrained("my-model", tokenizer)  # for xtrain generate, serve, transformers
    # [end:use]
    return bpb


# [start:validate]
@xtrain.no_grad()
def validate(model: xtrain.Transformer, corpus) -> float:
    """-> bits per byte of held-out text, which models with other tokenizers can be compared by"""
    batches = corpus.val_batches(4, B, T)
    nats = sum(model.loss(ids, targets).item() * targets.size for ids, targets in batches)
    return corpus.bits_per_byte(nats, np.concatenate([targets for _, targets in batches]))


# [end:validate]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]))
