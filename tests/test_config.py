"""Every error message for a bad config, the presets, and conversion to and from JSON."""

import faulthandler
import json
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from xtrain import ModelConfig, TrainConfig, UserError
from xtrain.config import MOST, PRESETS, resolve
from xtrain.nn.optim import learning_rate
from xtrain.rope_scalings import ROPE_SCALINGS
from xtrain.run_options import LONGEST_WATCHDOG

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
)  # fmt: skip


def model(**changes):
    return ModelConfig(**{**dict(vocab_size=100, dim=32, n_layers=2, n_heads=4), **changes})


# ----------------------------------------------------------------------------- the model
def test_defaults():
    c = model()
    assert (c.n_kv_heads, c.head_dim, c.hidden_dim) == (4, 8, 128)  # 8/3 32 = 85.3, up to 2 x 64
    assert c.padded_vocab_size == 128 and c.context == c.max_seq_len == 1024
    assert model(dim=768).hidden_dim == 2048 and model(vocab_size=128).padded_vocab_size == 128
    assert model(vocab_size=50257).padded_vocab_size == 50304
    assert model(n_heads=3, head_dim=6).head_dim == 6  # dim need not be divisible then
    with pytest.raises(FrozenInstanceError):
        c.dim = 3


POSITIVE = [
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "max_seq_len",
]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("bad", [0, -1, 2.0, "8", True])
def test_whole_numbers(name, bad):
    with pytest.raises(UserError, match=f"^{name} must be a positive whole number, got {bad!r}$"):
        model(**{name: bad})


def test_whole_numbers_of_numpy():
    c = model(vocab_size=np.int64(10), n_layers=np.int32(2))
    assert c == model(vocab_size=10, n_layers=2) and type(c.vocab_size) is type(c.n_layers) is int


@pytest.mark.parametrize("name", POSITIVE)
def test_sizes_have_an_upper_limit(name):
    most = MOST.get(name, 2**31 - 1)
    with pytest.raises(UserError, match=rf"^{name} must be at most {most}, got {most + 1}$"):
        model(**{name: most + 1})


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1e-6", None, True])
def test_positive_numbers(name, bad):
    with pytest.raises(UserError, match=f"^{name} must be a positive number, got {bad!r}$"):
        model(**{name: bad})


@pytest.mark.parametrize("name", ["qk_norm", "tie_embeddings"])
@pytest.mark.parametrize("bad", [0, 1, None, "true"])
def test_yes_or_no(name, bad):
    with pytest.raises(UserError, match=f"^{name} must be true or false, got {bad!r}$"):
        model(**{name: bad})


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(dim=30), "dim 30 is not divisible by n_heads 4: choose a divisor or give head_dim"),
        (dict(n_kv_heads=3), "n_heads 4 is not divisible by n_kv_heads 3: every key/value head"),
        (dict(n_kv_heads=8), "n_heads 4 is not divisible by n_kv_heads 8"),
        (dict(head_dim=7), "head_dim 7 is odd: RoPE rotates pairs, give an even head_dim"),
        (dict(dim=12), "head_dim 3 is odd"),
        (dict(head_dim=258), "head_dim 258 is larger than 256"),
        (dict(n_experts=4), "experts_per_token must be a positive whole number, got 0"),
        (dict(n_experts=4, experts_per_token=5), "experts_per_token 5 is larger than n_experts 4"),
        (dict(n_experts=1 << 11, experts_per_token=5), "n_experts must be at most 1024"),
        (dict(experts_per_token=2), "experts_per_token is given, but no n_experts"),
        (dict(dense_layers=(0,)), "dense_layers is given, but no n_experts"),
        (dict(n_experts=4, experts_per_token=1, dense_layers=(0, 1)), "dense_layers names every layer"),
        (dict(n_experts=4, experts_per_token=1, dense_layers=(2,)), "names a layer beyond the 2: [2]"),
        (dict(n_experts=4, experts_per_token=1, gelu=True), "gelu is not supported with n_experts"),
        (dict(qk_norm=False, joint_qk_norm=True), "joint_qk_norm is given, but no qk_norm"),
        (dict(rope_scaling=2.0), "rope_scaling must be a dict or None, got 2.0"),
        (dict(rope_scaling=dict(rope_type=[])), "rope_scaling type [] is not supported"),
        (dict(rope_scaling=dict(type="longrope", factor=2)), "rope_scaling type 'longrope' is not supported: choose one of"),
        (dict(rope_scaling=dict(rope_type="linear")), "'linear' needs a positive number for 'factor', got None"),
        (dict(rope_scaling=dict(type="dynamic", factor=-1)), "'dynamic' needs a positive number for 'factor', got -1"),
        (dict(rope_scaling=dict(LLAMA3, factor="8")), "'llama3' needs a positive number for 'factor', got '8'"),
        (dict(rope_scaling=dict(LLAMA3, high_freq_factor=1.0)), "high_freq_factor must be larger than low_freq_factor"),
    ],
)  # fmt: skip
def test_invalid_shapes(changes, sentence):
    with pytest.raises(UserError) as error:
        model(**changes)
    assert sentence in str(error.value)


@pytest.mark.parametrize("key", ROPE_SCALINGS["llama3"])
def test_llama3_needs_all_its_numbers(key):
    scaling = {k: v for k, v in LLAMA3.items() if k != key}
    with pytest.raises(UserError, match=f"'llama3' needs a positive number for '{key}', got None"):
        model(rope_scaling=scaling)


def test_scalings_that_are_allowed():
    for scaling in (None, {}, dict(type="default"), dict(type="linear", factor=2), LLAMA3):
        assert model(rope_scaling=scaling).context == 1024
    assert model(rope_scaling=dict(rope_type="dynamic", factor=2.5)).context == 2560
    assert model(rope_scaling=dict(rope_type="dynamic", factor=0.5)).context == 1024


def test_to_json_and_back():
    c = model(n_kv_heads=2, rope_scaling=LLAMA3, qk_norm=False, tie_embeddings=True, norm_eps=1e-5)
    values = json.loads(json.dumps(c.to_dict()))
    assert ModelConfig.from_dict(values) == c and values["head_dim"] == 8
    assert ModelConfig.from_dict(dict(vocab_size=5, dim=4, n_layers=1, n_heads=2)).head_dim == 2


def test_from_dict_names_unknown_and_missing_fields():
    good = model().to_dict()
    with pytest.raises(
        UserError,
        match=r"unknown model config depth, n_head: the fields are dense_layers, dim, expert_bias",
    ):
        ModelConfig.from_dict(good | dict(n_head=3, depth=1))
    with pytest.raises(UserError, match=r"^the model config lacks dim, vocab_size$"):
        ModelConfig.from_dict(dict(n_layers=2, n_heads=2))
    with pytest.raises(UserError, match="n_layers must be a positive whole number, got 0"):
        ModelConfig.from_dict(good | dict(n_layers=0))


def test_families_of_experts():
    experts = dict(n_experts=4, experts_per_token=2)
    for name, changes in {
        "Qwen3Moe": dict(renormalized_experts=False, dense_layers=(1,), sliding_window=5),
        "Mixtral": dict(qk_norm=False, sliding_window=5),
        "Olmoe": dict(joint_qk_norm=True, renormalized_experts=False),
    }.items():
        assert model(**experts, **changes).family == name
    for changes in (
        dict(sliding_window=5, full_attention_layers=(0,)),
        dict(qk_norm=False, renormalized_experts=False),
        dict(qk_norm=False, dense_layers=(0,)),
        dict(joint_qk_norm=True, sliding_window=5),
        dict(joint_qk_norm=True, head_dim=16),
        dict(qkv_bias=True),
    ):
        assert model(**experts, **changes).family == ""
    assert model(**experts).expert_hidden_dim == 128 and model().family == "Qwen3"


# ----------------------------------------------------------------------------- a run
WRONG = [
    *((dict([(name, bad)]), f"--{name.replace('_', '-')} must be positive, got {bad}")
      for name in ("steps", "batch", "micro_batch", "seq_len", "vocab_size", "stop_at", "eval_batches", "sample_tokens")
      for bad in (0, -3)),
    *((dict([(f"{name}_every", -1)]), f"--{name}-every must be positive, or 0 for never, got -1")
      for name in ("eval", "sample", "save")),
    (dict(max_skips=0), "--max-skips must be positive, got 0"),
    *((dict([(name, -0.1)]), f"--{name.replace('_', '-')} must be a number and not negative, got -0.1") for name in ("balance_loss", "router_z_loss")),
    (dict(experts=0), "--experts must be positive, got 0"),
    *((dict([(name, 10**20)]), f"--{name.replace('_', '-')} must be at most 2147483647, got 1000")
      for name in ("steps", "batch", "eval_batches", "max_skips")),
    *((dict([(name, most + 1)]), f"--{name.replace('_', '-')} must be at most {most}, got {most + 1}")
      for name, most in dict(vocab_size=2**22, layers=2**10, dim=2**18, hidden_dim=2**20, heads=2**12,
                             kv_heads=2**12, seq_len=2**24).items()),
    (dict(batch=2**20, seq_len=2**10), "are 1073741824 tokens in one forward pass, more than 16777216: give a smaller"),
    (dict(keep=-1), "--keep must not be negative, got -1"),
    (dict(warmup=-1), "--warmup must not be negative, got -1"),
    (dict(lr=0.0), "--lr must be a positive number, got 0.0"),
    (dict(lr=math.inf), "--lr must be a positive number, got inf"),
    (dict(lr=math.nan), "--lr must be a positive number, got nan"),
    (dict(min_lr_ratio=1.5), "--min-lr-ratio must be between 0 and 1, got 1.5"),
    (dict(schedule="wsd", decay_fraction=0.0), "--decay-fraction must be above 0 and at most 1, got 0.0"),
    (dict(eval_items=3), "--eval-items needs --eval-tasks: give both or neither"),
    (dict(decay_fraction=0.5), "--decay-fraction is for --schedule wsd, but the schedule is cosine: give both or neither"),
    (dict(decay_shape="linear"), "--decay-shape is for --schedule wsd, but the schedule is cosine"),
    (dict(ema=1.0), "--ema must be at least 0 and below 1, got 1.0"),
    (dict(beta1=1.0), "--beta1 and --beta2 must be at least 0 and below 1"),
    (dict(beta2=-0.1), "--beta1 and --beta2 must be at least 0 and below 1"),
    (dict(eps=0.0), "--eps must be a positive number, got 0.0"),
    (dict(clip=-1.0), "--clip and --weight-decay must be numbers and not negative"),
    (dict(weight_decay=math.nan), "--clip and --weight-decay must be numbers and not negative"),
    (dict(weight_decay=math.inf), "--clip and --weight-decay must be numbers"),
    (dict(eps=math.inf), "--eps must be a positive number, got inf"),
    (dict(change=len), "--change must be the name of a function, MODULE:FUNCTION, not <built-in"),
    (dict(sample_prompt="a\udcff"), "--sample-prompt 'a\\udcff' is not valid UTF-8 text"),
    *((dict(name=bad), "is not a folder inside --out") for bad in ("", ".", "..", "a/../..", "/tmp/a")),
    *((dict([(n, bad)]), f"--{n} {bad!r} is not valid UTF-8 text") for n in ("name", "out") for bad in ("a\0b", "\ud800")),
    *((dict([(name, "")]), f"--{name} is empty: give a path") for name in ("data", "out", "init", "tokenizer")),
    (dict(seed=-1), "--seed must not be negative, got -1"),
    (dict(batch=8, micro_batch=3), "--batch 8 is not a multiple of --micro-batch 3"),
    (dict(preset="huge"), "--preset 'huge' is not known: choose one of auto, tiny, dim384"),
    (dict(preset="tiny", micro_batch=3), "--batch 8 is not a multiple of --micro-batch 3"),
]  # fmt: skip


@pytest.mark.parametrize("options, sentence", WRONG)
def test_invalid_options(options, sentence):
    with pytest.raises(UserError) as error:
        resolve(TrainConfig(**options), gpu=False)
    assert sentence in str(error.value)


WRONG_OF_DDP = [
    *((dict(watchdog=bad), f"--watchdog must be between 0 (never) and 100000000 seconds, got {bad}")
      for bad in (-1.0, 1e10, math.inf, math.nan)),
    *((dict(bucket_mb=bad), f"--bucket-mb must be a positive number, got {bad}") for bad in (0.0, math.inf, math.nan)),
    (dict(check_ranks=-1), "--check-ranks must not be negative, got -1"),
    (dict(dp="tree"), "--dp 'tree' is not known: choose from none, naive, flat, overlap, bucket"),
]  # fmt: skip


@pytest.mark.parametrize("options, sentence", WRONG_OF_DDP)
def test_invalid_options_of_ddp(options, sentence):
    with pytest.raises(UserError) as error:
        TrainConfig(**options).validate()
    assert sentence in str(error.value)
    faulthandler.dump_traceback_later(LONGEST_WATCHDOG + 0.5)  # the longest allowed value works
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    run, shape = resolve(TrainConfig(preset=preset), gpu=False)
    assert all(getattr(run, name) is not None for name in PRESETS[preset].train)
    assert run.name == run.preset == preset and run.micro_batch == run.batch
    c = ModelConfig(vocab_size=run.vocab_size, **shape)
    assert c.max_seq_len == run.seq_len and c.qk_norm
    assert run.warmup < run.steps


def test_the_preset_follows_the_device():
    assert resolve(TrainConfig(), gpu=False)[0].preset == "tiny"
    assert resolve(TrainConfig(), gpu=True)[0].preset == "dim384"
    assert set(PRESETS) >= {"tiny", "dim384", "dim512", "dim768", "gpt124m"}
    assert resolve(TrainConfig(preset="dim512"), gpu=True)[1]["n_layers"] == 16


def test_a_warm_up_ends_before_the_run():
    """Otherwise the learning rate would end at its peak."""
    for steps in range(1, 40):
        warmup = resolve(TrainConfig(preset="tiny", steps=steps), gpu=False)[0].warmup
        assert warmup == 0 or warmup < steps - 1
        last = learning_rate(steps - 1, steps, 1.0, warmup, 0.1)
        assert steps == 1 or last == pytest.approx(0.1)
    assert resolve(TrainConfig(preset="tiny", steps=100), gpu=False)[0].warmup == 30
    for warmup, steps in ((49, 50), (50, 50), (100, 50), (1, 2), (1, 1)):
        with pytest.raises(UserError, match=f"--warmup {warmup} leaves no steps of --steps {steps} .* at most {max(0, steps - 2)}"):  # fmt: skip
            resolve(TrainConfig(steps=steps, warmup=warmup), gpu=False)
    earlier = TrainConfig(steps=50, warmup=100, resume=True)  # a run that an earlier version began
    assert resolve(earlier, gpu=False)[0].warmup == 100
    assert resolve(TrainConfig(steps=50, warmup=48), gpu=False)[0].warmup == 48


def test_given_values_override_the_preset():
    given = dict(steps=7, batch=4, seq_len=64, lr=0.5, warmup=0, name="mine", micro_batch=2)
    run, shape = resolve(TrainConfig(**given), gpu=False)
    assert {name: getattr(run, name) for name in given} == given and shape["max_seq_len"] == 64
    assert run.vocab_size == PRESETS["tiny"].train["vocab_size"]
    assert resolve(TrainConfig(batch=6), gpu=False)[0].micro_batch == 6
    again, _ = resolve(run, gpu=True)
    assert again == run == replace(run)
