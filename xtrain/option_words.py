"""The words of other programs for options and their values, and what to do about options that
xtrain does not have."""

import re
from typing import Any

from .errors import UserError

OTHER_NAMES = {  # xtrain's name -> what others call it
    "lr": "learning-rate",
    "batch": "batch-size train-batch-size global-batch-size",
    "steps": "max-steps max-iters num-steps",
    "epochs": "num-train-epochs num-epochs max-epochs",
    "seq-len": "block-size max-seq-length max-seq-len sequence-length context-length max-length cutoff-len",
    "precision": "dtype torch-dtype mixed-precision",
    "weights": "quantization",
    "kv-cache": "kv-cache-dtype",
    "out": "output-dir",
    "name": "run-name served-model-name",
    "data": "dataset dataset-name dataset-path train-file train-data",
    "val-data": "validation-file val-file eval-data",
    "text-key": "text-column dataset-text-field",
    "clip": "grad-clip max-grad-norm gradient-clipping",
    "warmup": "warmup-steps num-warmup-steps lr-warmup-steps warmup-iters",
    "weight-decay": "wd",
    "beta1": "adam-beta1",
    "beta2": "adam-beta2",
    "eps": "adam-epsilon adam-eps",
    "ema": "ema-decay",
    "eval-every": "eval-interval eval-steps",
    "save-every": "save-steps save-interval",
    "keep": "save-total-limit",
    "layers": "n-layer n-layers num-layers num-hidden-layers",
    "heads": "n-head n-heads num-heads num-attention-heads",
    "kv-heads": "n-kv-heads num-key-value-heads",
    "dim": "n-embd hidden-size d-model",
    "hidden-dim": "intermediate-size",
    "experts": "n-experts num-experts num-local-experts",
    "experts-per-token": "num-experts-per-tok moe-top-k",
    "expert-hidden-dim": "moe-intermediate-size",
    "balance-loss": "router-aux-loss-coef",
    "qk-norm": "use-qk-norm",
    "tie-embeddings": "tie-word-embeddings",
    "recompute": "gradient-checkpointing",
    "model": "model-path",
    "init": "init-from from-pretrained model model-name-or-path",
    "pack": "packing",
    "lora": "lora-r lora-rank",
    "lora-targets": "lora-target-modules target-modules",
    "lora-rslora": "use-rslora rslora",
    "lora-dora": "use-dora dora",
    "lora-modules-to-save": "modules-to-save",
    "lora-init": "init-lora-weights",
    "lora-rank-pattern": "rank-pattern",
    "lora-alpha-pattern": "alpha-pattern",
    "group": "num-generations",
    "kl": "beta kl-coef",
    "clip-ratio": "epsilon",
    "clip-ratio-high": "epsilon-high",
    "mask-truncated": "mask-truncated-completions",
    "algorithm": "loss-type",
    "loss": "loss-type",
    "target-margin": "simpo-gamma gamma",
    "teacher": "teacher-model-name-or-path teacher-model",
    "max-new-tokens": "max-tokens max-completion-length n-predict",
    "temperature": "temp",
    "top-k": "topk",
    "max-seq-len": "max-model-len",
    "max-batch": "max-num-seqs",
    "log": "report-to",
    "resume": "resume-from-checkpoint",
    "seed": "random-seed",
}  # fmt: skip
VALUES = {  # option -> {what others write: xtrain's word}
    "device": {"cuda": "gpu"},
    "precision": {"bfloat16": "bf16", "float32": "fp32"},
    "recompute": {"true": "block"},
    "weights": {"fp8_e4m3": "fp8"},
    "kv-cache": {"fp8_e4m3": "fp8"},
}
ONE_PER_GPU = "start one process per GPU, such as mpirun -n 4 xtrain train"
SEQUENCES = (
    "--batch counts the sequences of a step on all ranks, --micro-batch those of one forward pass"
)
SCHEDULE = "use --schedule cosine or wsd; for another see lessons/howto/change_the_model.md"
EVERY_STEP = "every step is written to metrics.jsonl, leave it out"
HINTS = {  # options that xtrain does not have -> what to do
    "epochs": "a run is counted in steps of batch x seq-len tokens: use --steps",
    "gradient-accumulation-steps": SEQUENCES,
    "accumulate": SEQUENCES,
    "per-device-train-batch-size": SEQUENCES,
    "per-device-batch-size": SEQUENCES,
    "gpus": ONE_PER_GPU,
    "num-gpus": ONE_PER_GPU,
    "nproc-per-node": ONE_PER_GPU,
    "world-size": ONE_PER_GPU,
    "ddp": ONE_PER_GPU,
    "tensor-parallel-size": "tensor parallelism is not supported: --zero 3 trains a model that exceeds one GPU",
    "gpu-memory-utilization": "give --max-batch and --max-seq-len, which decide the memory",
    "compile": "all kernels are compiled; --graph captures the step in a CUDA graph",
    "bf16": "use --precision bf16",
    "fp8": "use --precision fp8",
    "fp16": "fp16 is not supported: use --precision bf16",
    "fp32": "use --precision fp32",
    "amp": "use --precision bf16",
    "tf32": "matrix products in fp32 are fp32: use --precision bf16 for speed",
    "cpu": "use --device cpu",
    "use-cpu": "use --device cpu",
    "no-cuda": "use --device cpu",
    "cuda": "use --device gpu",
    "gpu": "use --device gpu",
    "min-lr": "give it as a fraction of --lr with --min-lr-ratio",
    "warmup-ratio": "give the number of steps with --warmup",
    "lr-scheduler": SCHEDULE,
    "lr-scheduler-type": SCHEDULE,
    "lr-schedule": SCHEDULE,
    "optim": "use --optimizer adamw or muon",
    "logging-steps": EVERY_STEP,
    "log-interval": EVERY_STEP,
    "log-every": EVERY_STEP,
    "eval-strategy": "give the steps between validations with --eval-every",
    "evaluation-strategy": "give the steps between validations with --eval-every",
    "save-strategy": "give the steps between checkpoints with --save-every",
    "num-workers": "the tokens are mapped from disk without workers: leave it out",
    "dataloader-num-workers": "the tokens are mapped from disk without workers: leave it out",
    "wandb": "use --log wandb",
    "trackio": "use --log trackio",
    "tensorboard": "use --log tensorboard",
    "dropout": "there is no dropout: leave it out",
    "lora-dropout": "LoRA dropout is not supported: leave it out",
    "push-to-hub": "a checkpoint is a Hugging Face folder: upload it with hf upload",
    "trust-remote-code": "no code of a model's folder is ever run: leave it out",
    "tokenizer": "the model has one: leave it out",
    "vocab-size": "the model's tokenizer decides it: leave it out",
    "preset": "the model has its shape: leave it out",
    **dict.fromkeys(
        ("layers", "dim", "heads", "kv-heads", "head-dim", "hidden-dim", "experts", "expert-bias",
         "experts-per-token", "expert-hidden-dim", "qk-norm", "tie-embeddings"),
        "the model has its shape: leave it out",
    ),
    "graph": "CUDA graphs are used where they can be: leave it out",
    "stream-output": "use --stream",
    "load-in-8bit": "use --weights int8",
    "load-in-4bit": "use --weights nf4, or int4",
    "lora": "use xtrain finetune --lora, see lessons/howto/finetune.md",
}  # fmt: skip


def own_word(option: str, value: Any) -> str:
    """Return xtrain's word for a value of --device, --precision and others (VALUES): "gpu" for
    "cuda". Raises UserError for a GPU by number and for fp16."""
    value = str(value).removeprefix("torch.")
    value = VALUES.get(option, {}).get(value.lower(), value)
    if option == "device" and re.fullmatch(r"cuda:\d+", value):
        raise UserError(
            f"--device {value}: choose a GPU with CUDA_VISIBLE_DEVICES={value[5:]} and give "
            "--device gpu"
        )
    if option == "precision" and value.lower() in ("fp16", "float16", "half", "16-mixed"):
        raise UserError(f"--precision {value} is not supported: use bf16, or fp32")
    return value
