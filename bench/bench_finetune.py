"""Fine-tuning, compared with TRL's trainer, and LoRA steps, compared with PEFT + torch.compile.

    python bench/bench_finetune.py [--only sft lora] [--peers]
    python bench/bench_finetune.py --only memory    alone: it reads the whole card's memory
    python bench/bench_finetune.py --only qlora     alone, too

sft     Qwen3-0.6B's shape, random weights, examples of random tokens whose lengths are log-normal
        (median 200, most below 1000). A step has --examples of them, or as many packed rows as hold
        that number. Tokens per second count the inputs of the examples, no padding. TRL pads each
        batch to its longest example, xtrain all rows to 2048.
lora    TinyLlama-1.1B's shape, rank 16 on all matrices, 4 sequences of 2048 random tokens.
memory  the same with 1 sequence and --recompute block, all that the process uses on the card,
        next to its plan.
qlora   Qwen3-8B's shape, weights in nf4, rank 16 on all matrices, 1 sequence of 512 and of
        1024 random tokens, --recompute block. The most memory of the card that NVML has seen, from
        the start of the process on, so with the quantizing.

Peak memory is what each library's allocator reserved on the card. Weights, batches and optimizer
options are alike, not the same: losses are compared in tests/tuning.
"""

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import _shapes
import cupy as cp
import numpy as np
import tyro
from _timing import record

import xtrain
from xtrain.config import TrainConfig
from xtrain.device import memory_peak_bytes
from xtrain.formats.architectures import config_to_hf
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.nn.quantized import quantize_onto
from xtrain.training import memory_plan
from xtrain.training.run import Run
from xtrain.tuning.examples import Example
from xtrain.tuning.finetune import Conversations

T = 2048
QWEN = xtrain.ModelConfig(**_shapes.QWEN3_06B, max_seq_len=T)
TINYLLAMA = xtrain.ModelConfig(**_shapes.TINYLLAMA, max_seq_len=T)
QWEN_8B = xtrain.ModelConfig(**_shapes.QWEN3_8B, max_seq_len=T)
LR = 1e-5
RANK = 16


@dataclass
class Options:
    only: list[Literal["sft", "lora", "memory", "qlora"]] = field(
        default_factory=lambda: ["sft", "lora"]
    )
    peers: bool = False  # measure TRL, PEFT and torch.compile in the same run
    examples: int = 8  # per step
    steps: int = 20  # timed, after 5 others


def synchronize() -> None:
    cp.cuda.Device().synchronize()


def timed(step, steps: int) -> list[float]:
    """Return median, p20 and p80 ms of a step, after 5 others"""
    times = []
    for _ in range(5 + steps):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return [round(float(x), 3) for x in np.percentile(times[5:], [50, 20, 80])]


def free() -> None:
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    with contextlib.suppress(ImportError):
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def some_examples(n: int) -> list[Example]:
    """Return random tokens; the first third of each is a prompt, which is not trained."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(200), 0.8, n), 16, T).astype(int)
    examples = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, QWEN.vocab_size, length + 1).astype(np.int32)
        examples.append(Example(str(i), ids, np.arange(length + 1) > length // 3))
    return examples


def twin(config: xtrain.ModelConfig) -> Any:
    """Return the model in transformers, with random float32 weights on the GPU."""
    import torch
    import transformers

    with torch.device("cuda"):
        theirs = transformers.AutoConfig.for_model(**config_to_hf(config))
        return transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa")


# ----------------------------------------------------------------------------- sft
def sft(o: Options) -> None:
    """Examples alone and packed."""
    examples = some_examples(1024)
    inputs = sum(len(x.ids) - 1 for x in examples) / len(examples)  # of an example, on average
    theirs = trl(o, examples) if o.peers else None
    for pack in (False, True):
        free()
        tokenizer: Any = SimpleNamespace(
            vocab_size=QWEN.vocab_size, token_lengths=np.ones(QWEN.vocab_size, np.int64)
        )
        corpus = Conversations("random", 1, examples, examples[:1], 0, tokenizer, None, pack)
        rows = len(corpus.rows(examples, T))
        batch = max(1, round(o.examples * rows / len(examples)))
        config = TrainConfig(
            batch=batch,
            micro_batch=batch,
            seq_len=T,
            steps=10**4,
            lr=LR,
            warmup=0,
            precision="bf16",
        )
        model = xtrain.Transformer(QWEN, 0, "gpu", "bf16")
        run = Run(config, model, corpus)  # type: ignore[arg-type]
        ms = timed(run.step, o.steps)
        each = batch * len(examples) / rows  # examples in a step
        record(
            "bench_finetune",
            "sft packed" if pack else "sft padded",
            shape=f"Qwen3-0.6B rows={batch} x {T}",
            dtype="bf16",
            ms=ms[0],
            value=each * inputs / ms[0] * 1e3,
            unit="tok/s",
            p20_p80=ms[1:],
            peak_gb=round(memory_peak_bytes("gpu") / 1e9, 2),
            examples=round(each, 2),
            **(theirs or {}),
        )
        run.close()


def trl(o: Options, examples: list[Example]) -> dict[str, Any]:
    """Measure TRL's SFTTrainer on the same examples; return its fields of a record."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        theirs = twin(QWEN)
        data = Dataset.from_list(
            [
                {
                    "input_ids": x.ids[:-1].tolist(),
                    "completion_mask": x.trained[:-1].astype(int).tolist(),
                }
                for x in examples
            ]
        )
        options = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=o.examples,
            max_steps=5 + o.steps,
            bf16=True,
            max_length=T,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            learning_rate=LR,
            logging_steps=1000,
            optim="adamw_torch_fused",
            dataloader_num_workers=0,
            disable_tqdm=True,
        )
        times: list[float] = []

        class Timer(transformers.TrainerCallback):
            def on_step_begin(self, *_, **__):
                torch.cuda.synchronize()
                times.append(-time.perf_counter())

            def on_step_end(self, *_, **__):
                torch.cuda.synchronize()
                times[-1] += time.perf_counter()

        words = {f"t{i}": i for i in range(3)}
        from tokenizers import Tokenizer, models

        backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="t1", pad_token="t2", unk_token="t0"
        )
        trainer = trl.SFTTrainer(
            theirs, options, train_dataset=data, processing_class=tokenizer, callbacks=[Timer()]
        )
        trainer.train()
        ms = [1e3 * x for x in times[5:]]
        inputs = sum(len(x.ids) - 1 for x in examples) / len(examples)
        median = float(np.median(ms))
        peak = torch.cuda.max_memory_reserved() / 1e9
    value = (
        o.examples * inputs / median * 1e3
    )  # the mean is longer: memory is allocated for new lengths
    return {
        "peer": f"TRL {trl.__version__}, padded",
        "peer_value": value,
        "peer_ms": [round(median, 3)],
        "peer_peak_gb": round(peak, 2),
    }


# ----------------------------------------------------------------------------- lora
def adapted(recompute: str = "none") -> AdaptedTransformer:
    kind: Any = recompute  # a literal type
    model = AdaptedTransformer(TINYLLAMA, 0, "gpu", "bf16", kind, trainable=False)
    model.adapt(Lora(RANK, 2.0 * RANK))
    return model


def lora_run(batch: int, model: AdaptedTransformer, length: int = T) -> Run:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, (batch, length + 1)).astype(np.int32)
    rows = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    corpus: Any = SimpleNamespace(loader=lambda *_: SimpleNamespace(next_batch=lambda: rows))
    c = TrainConfig(
        batch=batch,
        micro_batch=batch,
        seq_len=length,
        steps=10**4,
        lr=LR,
        warmup=0,
        precision="bf16",
    )
    return Run(c, model, corpus)  # type: ignore[arg-type]


def lora(o: Options) -> None:
    """Steps of adapters on a frozen model, and their memory."""
    shape = f"TinyLlama-1.1B r={RANK} B=4 T={T}"
    theirs = peft(o, 4) if o.peers else {}
    free()
    run = lora_run(4, adapted())
    ms = timed(run.step, o.steps)
    record(
        "bench_finetune",
        "lora",
        shape=shape,
        dtype="bf16",
        ms=ms[0],
        value=4 * T / ms[0] * 1e3,
        unit="tok/s",
        p20_p80=ms[1:],
        peak_gb=round(memory_peak_bytes("gpu") / 1e9, 2),
        **theirs,
    )
    run.close()


def memory(o: Options) -> None:
    """Measure the memory of a step with adapters, next to its plan."""
    run = lora_run(1, adapted("block"))
    ms = timed(run.step, 5)
    available, total = cp.cuda.Device().mem_info
    plan = memory_plan.plan(TINYLLAMA, 1, T, "bf16", "block", lora=RANK)
    record(
        "bench_finetune",
        "lora memory",
        shape=f"TinyLlama-1.1B r={RANK} B=1 T={T} recompute=block",
        dtype="bf16",
        ms=ms[0],
        value=(total - available) / 1e9,
        unit="GB",
        p20_p80=ms[1:],
        plan_gb=round((plan.reserved + memory_plan.OUTSIDE) / 1e9, 2),
    )
    run.close()


@contextlib.contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yield a list whose only element is the most memory of the card in use, in bytes."""
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByPciBusId(cp.cuda.Device().pci_bus_id)
    most = [0]
    done = threading.Event()

    def watch():
        while not done.wait(0.005):
            most[0] = max(most[0], pynvml.nvmlDeviceGetMemoryInfo(card).used)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def quantized_8b(config: xtrain.ModelConfig) -> AdaptedTransformer:
    """Return a model that was quantized as `xtrain finetune --weights nf4` does: from the CPU.

    Its matrices are zeros: memory and speed do not depend on values.
    """
    model = AdaptedTransformer(config, None, "cpu", "fp32", trainable=False)
    for _, p in model.named_parameters():
        if p.ndim == 1:
            p.data[...] = 1
    quantize_onto(model, "nf4", "gpu", "bf16")
    model.recompute = "block"
    model.adapt(Lora(RANK, 2.0 * RANK))
    return model


def qlora(o: Options) -> None:
    """Measure all memory of a step with adapters on a frozen model of 8 B parameters in nf4."""
    layers = int(os.environ.get("QLORA_LAYERS", QWEN_8B.n_layers))  # fewer to compile the kernels
    config = replace(QWEN_8B, n_layers=layers)
    with watched_memory() as most:
        model = quantized_8b(config)
        print(f"quantized: {most[0] / 1e9:.2f} GB at most", flush=True)
        for length in (512, 1024):
            run = lora_run(1, model, length)
            ms = timed(run.step, 5)
            record(
                "bench_finetune",
                "qlora memory",
                shape=f"Qwen3-8B {layers} layers nf4 r={RANK} B=1 T={length} recompute=block",
                dtype="nf4",
                ms=ms[0],
                value=most[0] / 1e9,
                unit="GB",
                p20_p80=ms[1:],
            )
            run.close()


def peft(o: Options, batch: int) -> dict[str, Any]:
    """Measure PEFT's adapters, compiled; return their fields of a record."""
    import peft
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    base = twin(TINYLLAMA).bfloat16()
    options = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(base, options)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], LR, fused=True
    )
    ids = torch.randint(0, TINYLLAMA.vocab_size, (batch, T), device="cuda")
    compiled = torch.compile(model)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()

    ms = timed(step, o.steps)
    peak = torch.cuda.max_memory_reserved() / 1e9
    torch._dynamo.reset()
    return {
        "peer": f"peft {peft.__version__} + torch.compile",
        "peer_value": batch * T / ms[0] * 1e3,
        "peer_ms": ms,
        "peer_peak_gb": round(peak, 2),
    }


def main(o: Options) -> None:
    for name in o.only:
        {"sft": sft, "lora": lora, "memory": memory, "qlora": qlora}[name](o)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
