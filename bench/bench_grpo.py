"""GRPO: a step in exact and fast mode, TRL's trainer with transformers rollouts, rollouts alone.

    python bench/bench_grpo.py [--only step trl rollouts] [--modes exact fast] [--lengths 5.6 32 128 512]

Random weights in bf16; tokenizer and prompts are made here, so nothing is read or downloaded. Each
part takes at most two minutes on an H200.

step       Qwen3-0.6B's shape, --prompts x --group completions of --tokens tokens: rollouts (drawing,
           rewards, arrays) and training of one step of `xtrain reinforce`. `value` is the whole step
           in milliseconds; of the exact mode `cost` is exact / fast.
trl        the same step of trl.GRPOTrainer with transformers' generate. Without TRL: the rollouts
           alone, and the record says so. Weights, gradients and moments are in bf16 there; xtrain
           keeps them in float32.
rollouts   SmolLM2-135M's shape: completions of 5.6 tokens in the mean (1 to 12), of 32, 128 and 512
           against transformers' generate, which runs until the longest one of the batch has ended.
           xtrain also returns the log-probabilities, which training needs.

Every time is the median of --repeats runs, after --warm-up steps or one other run.
"""

import gc
import importlib.util
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tokenizers
import tyro
from _shapes import QWEN3_06B, SMOLLM2
from _timing import record
from tokenizers import decoders, pre_tokenizers

import xtrain
from xtrain.data.tokenizer import END_OF_TEXT, Tokenizer
from xtrain.device import free_cached, resolve_device
from xtrain.formats.architectures import config_to_hf
from xtrain.reinforcement.prompts import Prompt, Prompts
from xtrain.reinforcement.reinforce import PreparedConfig, ReinforceRun

TINY = dict(vocab_size=300, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=128)
SHAPES: dict[str, dict[str, Any]] = {"0.6B": QWEN3_06B, "135M": SMOLLM2, "tiny": TINY}
NAMES = {"0.6B": "Qwen3-0.6B", "135M": "SmolLM2-135M", "tiny": "tiny"}
MEAN = 5.6  # tokens of the short completions, of at most LONGEST
LONGEST = 12
DEVICE = resolve_device("auto")
TORCH_DEVICE = "cuda" if DEVICE == "gpu" else "cpu"
PRECISION: Any = "bf16" if DEVICE == "gpu" else "fp32"


@dataclass
class Options:
    only: list[Literal["step", "trl", "rollouts"]] = field(
        default_factory=lambda: ["step", "trl", "rollouts"]
    )
    modes: list[Literal["exact", "fast"]] = field(default_factory=lambda: ["exact", "fast"])
    lengths: list[float] = field(default_factory=lambda: [MEAN, 32, 128, 512])
    model: Literal["0.6B", "135M", "tiny"] = "0.6B"  # of step and trl
    small: Literal["135M", "tiny"] = "135M"  # of rollouts
    prompts: int = 64
    group: int = 8
    tokens: int = 512  # of a completion
    prompt_tokens: int = 64
    micro_batch: int = 32  # rows of a forward pass of training
    trl_micro_batch: int = 16
    repeats: int = 2
    warm_up: int = 2  # steps that are not counted: the first mode also fills the memory pools


def clean() -> None:
    """Give unused memory back, that of torch too."""
    gc.collect()
    free_cached(DEVICE)
    if DEVICE == "gpu" and importlib.util.find_spec("torch"):
        import torch

        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU."""
    if DEVICE == "gpu":
        import cupy as cp

        cp.cuda.Device().synchronize()


def median_ms(seconds: list[float], warm_up: int = 1) -> float:
    """Return the median in ms of all but the first ones."""
    return 1e3 * statistics.median(seconds[warm_up:])


# ----------------------------------------------------------------------------- texts and rewards
def make_backend(vocab_size: int) -> tokenizers.Tokenizer:
    """Return a tokenizer of single bytes whose other ids decode to a text of their own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END_OF_TEXT, *letters, *(f"t{i}" for i in range(257, vocab_size))]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def texts(o: Options, n: int) -> list[str]:
    """Return n prompts of prompt_tokens bytes."""
    letters = np.random.default_rng(0).integers(97, 123, (n, o.prompt_tokens))
    return ["".join(map(chr, row)) for row in letters]


def score(completion: str) -> float:
    """Return a number that differs between completions."""
    return sum(completion[:200].encode()) % 97 / 97


def reward(record: dict, completions: list[str]) -> list[float]:
    """The task of `xtrain reinforce`."""
    return [score(text) for text in completions]


# ----------------------------------------------------------------------------- step
class TimedRun(ReinforceRun):
    """A run that keeps the seconds of its rollouts."""

    rollout_seconds = 0.0

    def next_batch(self) -> Any:
        start = time.perf_counter()
        batch = super().next_batch()
        synchronize()
        self.rollout_seconds = time.perf_counter() - start
        return batch


def make_run(o: Options, exact: bool) -> TimedRun:
    """Return a run of random weights that is ready for its first step."""
    shape = SHAPES[o.model] | {"max_seq_len": o.prompt_tokens + o.tokens}
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), 0, DEVICE, PRECISION)
    tokenizer = Tokenizer(make_backend(shape["vocab_size"]))
    prompts = [
        Prompt(str(i), tokenizer.encode(text), {"prompt": text})
        for i, text in enumerate(texts(o, o.prompts + 1))
    ]
    corpus = Prompts("bench", 1, prompts[1:], prompts[:1], 0, tokenizer, o.group, frozenset())
    batch = o.prompts * o.group
    config = PreparedConfig(
        batch=batch,
        group=o.group,
        task="bench_grpo:reward",
        rollout_batch=batch,
        micro_batch=min(o.micro_batch, batch),
        max_new_tokens=o.tokens,
        seq_len=o.prompt_tokens + o.tokens,
        exact=exact,
        precision=PRECISION,
    )
    return TimedRun(config, model, corpus)


def bench_step(o: Options) -> None:
    """Record a step of each mode, and what the exact one costs."""
    medians = {}
    for mode in reversed(o.modes):  # fast first, so that the record of exact has both
        run = make_run(o, mode == "exact")
        steps = []
        rollouts = []
        for _ in range(o.warm_up + o.repeats):
            synchronize()
            start = time.perf_counter()
            result = run.step()
            synchronize()
            steps.append(time.perf_counter() - start)
            rollouts.append(run.rollout_seconds)
        medians[mode] = median_ms(steps, o.warm_up)
        rollout_ms = median_ms(rollouts, o.warm_up)
        more: dict[str, Any] = {}
        if mode == "exact" and "fast" in medians:
            fast = medians["fast"]
            more = dict(peer="fast mode", peer_value=fast, cost=round(medians[mode] / fast, 4))
        record(
            "bench_grpo",
            f"step {mode} {NAMES[o.model]}",
            shape=step_shape(o),
            dtype=PRECISION,
            ms=medians[mode],
            value=medians[mode],
            unit="ms",
            rollout_ms=round(rollout_ms, 1),
            training_ms=round(medians[mode] - rollout_ms, 1),
            ratio_error=result.extra["ratio_error"],
            all_s=[round(x, 2) for x in steps],
            **more,
        )
        del run, result
        clean()


def step_shape(o: Options) -> str:
    """Return the shape of a record."""
    return f"{o.prompts} prompts of {o.prompt_tokens} x {o.group} completions of {o.tokens}"


# ----------------------------------------------------------------------------- transformers, TRL
def twin(shape: dict[str, Any]) -> Any:
    """Return the model in transformers, with random weights."""
    import torch
    import transformers

    theirs = transformers.AutoConfig.for_model(**config_to_hf(xtrain.ModelConfig(**shape)))
    theirs.eos_token_id = None  # no completion ends early
    dtype = torch.bfloat16 if DEVICE == "gpu" else torch.float32
    with torch.device(TORCH_DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            theirs, attn_implementation="sdpa", dtype=dtype
        )
    model.generation_config.eos_token_id = None
    return model


def generate_seconds(model: Any, ids: np.ndarray, tokens: int) -> float:
    """Return seconds of transformers' generate for a row of ids each, at temperature 1."""
    import torch

    prompts = torch.tensor(ids, device=TORCH_DEVICE)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
    assert out.cpu().shape[1] == ids.shape[1] + tokens
    return time.perf_counter() - start


def bench_trl(o: Options) -> None:
    """Record a step of TRL's GRPOTrainer; without TRL transformers' rollouts."""
    shape = SHAPES[o.model] | {"max_seq_len": o.prompt_tokens + o.tokens}
    if importlib.util.find_spec("trl"):
        step_ms, rollout_ms, name = trl_step(o, shape)
        more = dict(rollout_ms=round(rollout_ms, 1), training_ms=round(step_ms - rollout_ms, 1))
    else:
        model = twin(shape).eval()
        rows = o.prompts * o.group
        ids = np.random.default_rng(0).integers(1, 250, (rows, o.prompt_tokens))
        times = [generate_seconds(model, ids, o.tokens) for _ in range(2)]
        step_ms = median_ms(times)
        name = "rollouts of transformers, TRL is not installed"
        more = dict(rollout_ms=round(step_ms, 1))
    record(
        "bench_grpo",
        f"{name} {NAMES[o.model]}",
        shape=step_shape(o),
        dtype=PRECISION,
        ms=step_ms,
        value=step_ms,
        unit="ms",
        **more,
    )
    clean()


def trl_step(o: Options, shape: dict[str, Any]) -> tuple[float, float, str]:
    """Return ms of a step of GRPOTrainer and of its rollouts, and the name with the version.

    Two steps; the first is not counted.
    """
    import datasets
    import transformers
    import trl

    class Watch(transformers.TrainerCallback):
        """The seconds of each step."""

        def __init__(self):
            self.start = 0.0
            self.steps = []

        def on_step_begin(self, *_, **__):
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            synchronize()
            self.steps.append(time.perf_counter() - self.start)

    rollouts = []

    class Trainer(trl.GRPOTrainer):
        """Keeps the seconds of its rollouts."""

        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            synchronize()
            rollouts.append(time.perf_counter() - start)
            return result

    steps = 2
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend(shape["vocab_size"]),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    lines = [{"prompt": text} for text in texts(o, o.prompts * steps)]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        options = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=o.trl_micro_batch,
            gradient_accumulation_steps=o.prompts * o.group // o.trl_micro_batch,
            num_generations=o.group,
            max_completion_length=o.tokens,
            generation_kwargs={"min_new_tokens": o.tokens},
            temperature=1.0,
            top_k=0,
            beta=0.0,
            loss_type="bnpo",  # the mean over the tokens of the batch, as xtrain
            learning_rate=1e-6,
            max_steps=steps,
            bf16=DEVICE == "gpu",
            use_cpu=DEVICE != "gpu",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=twin(shape),
            reward_funcs=lambda completions, **_: [score(text) for text in completions],
            args=options,
            train_dataset=datasets.Dataset.from_list(lines),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
    assert len(watch.steps) == len(rollouts) == steps
    return median_ms(watch.steps), median_ms(rollouts), f"step of TRL {trl.__version__}"


# ----------------------------------------------------------------------------- rollouts
def lengths_of(length: float, n: int) -> list[int]:
    """Return the tokens of the completions of each prompt, `length` in the mean."""
    if length != MEAN:
        return [round(length)] * n
    drawn = np.random.default_rng(1).geometric(0.1, 100 * n)
    return [int(x) for x in drawn[drawn <= LONGEST][: n - 1]] + [LONGEST]


def bench_rollouts(o: Options) -> None:
    """Record xtrain's rollouts in both modes next to transformers' generate."""
    shape = SHAPES[o.small] | {"max_seq_len": o.prompt_tokens + int(max(o.lengths)) + LONGEST}
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), 0, DEVICE, PRECISION)
    theirs = twin(shape).eval()
    rng = np.random.default_rng(0)
    ids = rng.integers(1, shape["vocab_size"], (o.prompts, o.prompt_tokens))
    for length in o.lengths:
        lengths = lengths_of(length, o.prompts)
        repeats = 1 + (o.repeats if length > 100 else 5)
        rows = np.repeat(ids, o.group, 0)
        peer = median_ms([generate_seconds(theirs, rows, max(lengths)) for _ in range(repeats)])
        clean()
        for mode in o.modes:
            engine = xtrain.Engine(
                model,
                o.prompts * o.group,
                o.prompt_tokens + max(lengths),
                mode == "exact",
                reuse_prefix=False,
            )
            times = []
            for i in range(repeats):
                start = time.perf_counter()
                answers = engine.generate(
                    ids.tolist(), lengths, 1.0, seed=[i] * o.prompts, logprobs=0, n=o.group
                )
                times.append(time.perf_counter() - start)
            ms = median_ms(times)
            record(
                "bench_grpo",
                f"rollouts {mode} {NAMES[o.small]}",
                shape=f"{o.prompts} x {o.group} completions of {np.mean(lengths):.1f}",
                dtype=PRECISION,
                ms=ms,
                value=ms,
                unit="ms",
                peer="transformers generate",
                peer_value=peer,
                tokens_s=round(sum(map(len, answers)) / ms * 1e3),
            )
            del engine, answers
            clean()


def main() -> None:
    """Run the parts that the options name."""
    o = tyro.cli(Options, description=__doc__)
    if "step" in o.only:
        bench_step(o)
    if "trl" in o.only:
        bench_trl(o)
    if "rollouts" in o.only:
        bench_rollouts(o)


if __name__ == "__main__":
    main()
