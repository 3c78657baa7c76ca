"""DPO (Rafailov et al. 2023): train on pairs of answers, one of them preferred. Checkpoints, metrics, report: as in training.

python examples/dpo.py MODEL_FOLDER PAIRS.jsonl [STEPS]      lines of "prompt", "chosen", "rejected"; the run is runs/dpo

    margin = log pi(chosen) - log ref(chosen) - log pi(rejected) + log ref(rejected)
    loss   = mean over pairs of -log sigmoid(beta margin)      d loss / d margin = -beta sigmoid(-beta margin) / pairs

A pair is a row: the chosen text, then the rejected one, two documents that do not see each other (tuning/rows.py).
"""

import sys
from pathlib import Path

import numpy as np

from xtrain import Transformer, UserError, no_grad
from xtrain import functional as F
from xtrain.data.records import json_records
from xtrain.data.tokenizer import Tokenizer
from xtrain.device import to_device, to_numpy
from xtrain.formats.saved_runs import model_folder
from xtrain.report import page
from xtrain.training import loop
from xtrain.training.run import Run
from xtrain.tuning.examples import Example, answer_ids
from xtrain.tuning.finetune import Conversations, FinetuneConfig, filled

BETA = 0.1


def dpo(logprobs_BT, reference_BT, targets_BT, starts_BT):
    """-> loss, its derivative (B, T) float32, the share of pairs in the right order. starts: 0 in the chosen text, else above."""
    sign_BT = np.where(targets_BT == -100, 0, np.where(starts_BT == 0, 1, -1))
    margins_B = np.where(sign_BT, sign_BT * (logprobs_BT - reference_BT), 0).sum(1, dtype=float)
    slopes_B = -BETA / (1 + np.exp(BETA * margins_B)) / len(margins_B)
    loss = np.logaddexp(0, -BETA * margins_B).mean()
    return loss, (sign_BT * slopes_B[:, None]).astype(np.float32), (margins_B > 0).mean()


class Pairs(Conversations):
    def rows(self, examples, T, seed=0):
        return [[i, i + 1] for i in range(0, len(examples), 2)]


class DPO(Run):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        c = self.config
        self.reference = Transformer.from_pretrained(c.init, self.model.device, c.precision)

    def loss(self, batch, inv_count=None):
        ids, targets, starts = batch
        logprobs = self.model.logprobs(ids, targets, starts)
        with no_grad():
            reference = self.reference.logprobs(ids, targets, starts)
        arrays = map(to_numpy, (logprobs.data, reference.data, targets, starts))
        loss, derivative, self.right = dpo(*arrays)
        return F.with_gradient(logprobs, loss, to_device(derivative, self.model.device))

    @no_grad()
    def report_validation(self, log):
        c = self.config
        loss = self.loss(self.corpus.val_batches(1, c.eval_batches * c.batch, c.seq_len)[0]).item()
        self.val_loss, numbers = (self.done, loss), {"val_loss": loss, "val_right": self.right}
        log.measured(self.done, numbers, f"loss {loss:.4f}, {self.right:.0%} in the right order")


def main(folder: str, file: str, steps: int = 100, out: str = "runs") -> Path:
    source = model_folder(Path(folder))  # of a run: its newest checkpoint
    tokenizer, texts = Tokenizer.load(source), []
    for record in json_records(Path(file)):
        prompt = tokenizer.encode_prompt(record.text("prompt"))
        for name in ("chosen", "rejected"):
            ids = prompt + answer_ids(record.text(name), tokenizer)
            trained = np.arange(len(ids)) >= len(prompt)
            texts.append(Example(record.where, np.array(ids, np.int32), trained))
    held = 2 * max(1, len(texts) // 40)
    if len(texts) <= held:
        raise UserError(f"{file} has fewer than two pairs: give more")
    corpus = Pairs(Path(file).name, 1, texts[held:], texts[:held], 0, tokenizer, None, pack=True)
    config = FinetuneConfig(
        init=str(source), data=(file,), name="dpo", out=out, steps=steps, batch=8, lr=1e-4,
        seq_len=2 * corpus.seq_len, graph=False,
    )  # fmt: skip
    config = filled(config, corpus, config.seq_len, 1)
    return loop.train(config, make_run=DPO, corpus=corpus, write_report=page.finish)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
