"""LoRA (Hu et al. 2021): train small factors next to frozen matrices, merge them, save an ordinary model.

python examples/lora.py MODEL_FOLDER FILE_OR_FOLDER [STEPS]      the result is written to my-lora
"""

import sys
from pathlib import Path

import numpy as np

import xtrain
from xtrain import functional as F
from xtrain.data.dataset import prepare
from xtrain.formats.saved_runs import model_folder
from xtrain.nn import Linear, Parameter
from xtrain.nn.optim import clip


class LoRA(Linear):
    """y = x w^T + scale (x a^T) b^T, with w frozen and b = 0 at first."""

    def __init__(self, linear: Linear, r: int = 8, alpha: float = 16):
        self.weight, (rows, columns) = linear.weight, linear.weight.shape
        self.weight.requires_grad = False
        self.lora_a = Parameter((r, columns), 0.02, {"lora_a": r})
        self.lora_b = Parameter((rows, r), 0.0, {"lora_b": rows})
        self.scale = alpha / r

    def __call__(self, x_NI):
        update_NO = F.linear(F.linear(x_NI, self.lora_a), self.lora_b)
        return F.linear(x_NI, self.weight) + update_NO * self.scale

    def merged(self) -> np.ndarray:
        return self.weight.numpy() + self.scale * (self.lora_b.numpy() @ self.lora_a.numpy())


def main(folder: str, data: str, steps: int = 100, T: int = 64) -> list[float]:
    source = model_folder(Path(folder))  # of a run: its newest checkpoint
    model = xtrain.Transformer.from_pretrained(source)
    plain = xtrain.Transformer.from_pretrained(source)  # takes the merged weights at the end
    for _, parameter in model.storage():
        parameter.requires_grad = False
    for layer in model.model.layers:
        layer.self_attn.qkv = LoRA(layer.self_attn.qkv)
        layer.mlp.down_proj = LoRA(layer.mlp.down_proj)
    model.renew_arena()  # memory for the new parameters
    optimizer = xtrain.AdamW(model, lr=1e-3, weight_decay=0.0)
    corpus = prepare(data, tokenizer=source / "tokenizer.json")
    loader, losses = corpus.loader(8, T, seed=0), []
    for _ in range(steps):
        ids, targets = loader.next_batch()
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.step(clip(model, 1.0)[1])
        losses.append(loss.item())
    for new, old in zip(plain.model.layers, model.model.layers):
        new.self_attn.qkv.weight.data = old.self_attn.qkv.merged()
        new.mlp.down_proj.weight.data = old.mlp.down_proj.merged()
    plain.save_pretrained("my-lora", corpus.tokenizer)
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the merged model: {plain.loss(ids, targets).item():.3f}"
    )
    return losses


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
