"""python -m xtrain.profile: the plan of any model, the measurement on what is here, clear sentences."""

import json
from types import SimpleNamespace

import pytest
from checks import GPU
from rich.console import Console

from xtrain.config import ModelConfig, TrainConfig, resolve
from xtrain.errors import UserError
from xtrain.inspect import kernel_times, profile
from xtrain.inspect.kernel_times import Row
from xtrain.inspect.profile import Options, model_config
from xtrain.nn.observers import Op
from xtrain.profile import main
from xtrain.training import memory_plan as memory
from xtrain.training import out_of_memory

SMALL = ["--dim", "32", "--layers", "2", "--heads", "2", "--vocab-size", "64", "--batch", "2", "--seq-len", "16"]  # fmt: skip


# ----------------------------------------------------------------------------- which model
def test_a_preset_is_changed_by_what_is_given():
    config, batch, T = model_config(Options(plan=True, preset="dim384"))
    assert (config.dim, config.n_layers, config.vocab_size, batch, T) == (384, 12, 16384, 32, 256)
    config, batch, T = model_config(
        Options(plan=True, preset="dim384", dim=1024, layers=3, batch=5)
    )
    assert (config.dim, config.n_layers, config.n_heads, config.head_dim) == (1024, 3, 32, 32)
    assert config.hidden_dim == 2752 and config.n_kv_heads == 32 and batch == 5
    config, _, _ = model_config(
        Options(plan=True, preset="dim384", heads=6, kv_heads=2, seq_len=99)
    )
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.max_seq_len) == (
        6,
        2,
        64,
        99,
    )


@pytest.mark.parametrize("preset", ["auto", "tiny", "gpt124m"])
def test_a_plan_is_of_the_model_that_is_trained(preset):
    given = dict(preset=preset, layers=3, seq_len=64)
    config, batch, T = model_config(Options(plan=True, **given))
    c, shape = resolve(TrainConfig(**given), gpu=True)
    assert config == ModelConfig(vocab_size=c.vocab_size, **shape)
    assert (batch, T) == (c.batch, c.seq_len)


@pytest.mark.skipif(GPU, reason="on a GPU the allocation fails")
def test_a_step_that_cannot_fit_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(out_of_memory, "free_memory", lambda: 1 << 10)
    assert main(SMALL) == 2
    said = capsys.readouterr().err
    assert said.startswith("xtrain.profile: a run with steps of 2 x 16 tokens")
    assert "are available: use a smaller --batch" in said and said.count("\n") == 1


def test_one_billion():
    config, _, _ = model_config(Options(plan=True, preset="1b"))
    assert 1.0e9 < memory.parameters(config) < 1.1e9
    with pytest.raises(UserError, match="choose one of"):
        model_config(Options(preset="1b"))  # to plan with only


# ----------------------------------------------------------------------------- the plan
def test_the_plan_says_what_fits(capsys):
    assert main(["--plan", *SMALL, "--precision", "bf16", "--gpus", "1,4", "--gpu-gb", "1"]) == 0
    out = capsys.readouterr().out
    for text in ("weights", "moments", "bf16 copy", "logits", "workspace", "GPU of 1 GB", "ZeRO-1", "This is a plan"):  # fmt: skip
        assert text in out, text
    assert out.count("attention │") >= 2  # a line per precision


def test_what_does_not_fit_is_said(capsys):
    arguments = ["--plan", *SMALL, "--gpu-gb", "0.5", "--gpus", "3"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "none" in out and "no" in out.split("ZeRO-1, GB")[1]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--plan", "--preset", "huge"], "--preset 'huge' is not known"),
        (["--plan", "--gpus", "1;2"], "--gpus takes whole numbers"),
        (["--plan", "--gpus", "0"], "--gpus takes whole numbers"),
        (["--plan", "--batch", "-1"], "--batch must be positive, got -1"),
        (["--plan", "--seq-len", "0"], "--seq-len must be positive, got 0"),
        (["--plan", "--gpu-gb", "inf"], "--gpu-gb must be positive, got inf"),
        (["--plan", "--lora", "-1"], "--lora must be a positive rank"),
        (["--plan", "--weights", "nf4"], "--weights nf4 needs --lora: give a rank"),
        (["--steps", "0"], "--steps must be positive"),
        (["--plan", "--dim", "100", "--heads", "3"], "not divisible"),
    ],
)
def test_one_sentence_for_what_can_be_mended(arguments, sentence, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("xtrain.profile: ") and "Traceback" not in error


# ----------------------------------------------------------------------------- measuring
@pytest.mark.skipif(GPU, reason="the CPU's table")
def test_on_a_cpu_ops_are_listed(capsys, tmp_path):
    picture = tmp_path / "memory.png"
    assert main([*SMALL, "--steps", "2", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for part in ("data", "forward", "backward", "clip + AdamW", "whole step", "SwiGLU", "tokens per second"):  # fmt: skip
        assert part in out, part
    assert picture.stat().st_size > 10_000


def test_no_part_takes_less_than_no_time(monkeypatch):
    """Steps of very different speed, as on a busy machine: parts are measured in the same steps, not subtracted."""
    clock, calls = [0.0], [0]

    def busy():
        calls[0] += 1
        clock[0] += 1 + 1000 * (calls[0] % 7 == 0)
        return clock[0]

    with profile.a_run(Options(dim=32, layers=1, heads=1, vocab_size=64, batch=2, seq_len=8, precision="fp32", device="cpu")) as run:  # fmt: skip
        for offset in range(7):
            calls[0] = offset
            with monkeypatch.context() as patch:
                patch.setattr(profile.time, "perf_counter", busy)
                ms = profile.parts(run, 3)
            assert list(ms) == ["data", "forward", "backward", "clip + AdamW", "whole step"]
            assert all(t > 0 for t in ms.values()), ms


def test_the_precision_of_a_profile(capsys):
    """As in training; a plan is for a GPU with bf16."""
    assert main(["--plan", *SMALL, "--head-dim", "32", "--gpus", "1", "--gpu-gb", "0.5"]) == 0
    assert "bf16, recompute none" in capsys.readouterr().out
    assert main(["--plan", *SMALL, "--head-dim", "40", "--gpus", "1", "--gpu-gb", "0.5"]) == 0
    assert "fp32, recompute none" in capsys.readouterr().out
    assert main([*SMALL, "--steps", "1", "--device", "cpu"]) == 0
    assert ", fp32, on CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--picture", "none/x.png"], "none/x.png cannot be written: No such file or directory"),
        (["--picture", "a.txt/x.png"], "a.txt/x.png cannot be written: Not a directory"),
        (["--picture", "x.foo"], "--picture x.foo must end with one of .png"),
        (["--trace", "x.json"], "--trace needs a GPU: omit it on a CPU"),
        (["--plan", "--picture", "x.png"], "--trace and --picture need a measured step"),
    ],
)
def test_files_are_refused_before_anything_is_measured(
    capsys, tmp_path, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert main([*SMALL, "--device", "cpu", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"xtrain.profile: {sentence}") and not said.out
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_a_profile_lacks_is_named_whole(monkeypatch, capsys):
    """Why there is no CUPTI, also with brackets, which rich takes for markup."""

    class Recorder:
        def __init__(self, events=False): ...
        def __call__(self, step, observer=None): ...
        def timed(self): ...

    def cupti_times(run):
        raise kernel_times.NoTimes("no cupti.so in [lib, lib64]")

    monkeypatch.setattr(kernel_times, "cupti_times", cupti_times)
    monkeypatch.setattr(kernel_times, "limits", lambda precision: (1.0, 1.0))
    monkeypatch.setattr(kernel_times, "rows", lambda times, steps: [])
    monkeypatch.setattr(profile, "Recorder", Recorder)
    monkeypatch.setattr(profile, "kernel_table", lambda *_: "")
    run = SimpleNamespace(model=None, config=SimpleNamespace(precision="fp32"))
    profile._kernels(SimpleNamespace(trace=None, steps=1), run, Console())
    assert "no cupti.so in [lib, lib64]: times are from" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("more", [["--no-graph"], ["--precision", "bf16", "--recompute", "block"]])
def test_on_a_gpu_kernels_are_listed(capsys, tmp_path, more):
    trace, picture = tmp_path / "trace.json", tmp_path / "memory.png"
    more = [*more, "--head-dim", "16", "--trace", str(trace), "--picture", str(picture)]
    assert main([*SMALL, "--steps", "3", *more]) == 0
    out = capsys.readouterr().out
    for part in ("whole step", "adamw_kernel", "product", "TFLOP/s"):
        assert part in out, part
    assert "busy" in out or "pip install cupti-python" in out
    assert json.loads(trace.read_text())["traceEvents"] and picture.stat().st_size > 10_000


def test_a_narrow_table_divides_no_name(capsys):
    name = "decode_attention_fp8_kernel"
    table = [Row(name, "attention forward", 12, 2e6, int(6e9), None)]
    Console(width=80).print(profile.kernel_table(table, copy=4e12, product=100e12))
    assert name in capsys.readouterr().out


def test_rates_and_shares_of_the_kernel_table():
    table = [
        Row("copying", "SwiGLU forward", 12, 2e6, int(6e9), None),
        Row("product", "Linear forward", 1, 1e6, 100, 50e9),
        Row("unknown", "", 1, 1e6, None, None),
    ]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(profile.kernel_table(table, copy=4e12, product=100e12))
    lines = console.export_text().splitlines()
    copying, product, unknown = (
        next(line for line in lines if name in line) for name in ("copying", "product", "unknown")
    )
    assert "3,000" in copying and "75 %" in copying and "50.0 %" in copying
    assert "50.0" in product and "50 %" in product and "25.0 %" in product
    assert unknown.count("%") == 1


def test_the_picture_is_drawn_from_a_plan(tmp_path):
    config, batch, T = model_config(Options(plan=True, dim=32, heads=2, layers=2, vocab_size=64, seq_len=16))  # fmt: skip
    path = tmp_path / "memory.png"
    profile.draw(memory.plan(config, batch, T), [0, 10**6, 5 * 10**5], str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_nvtx_is_optional(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    assert profile.nvtx_ranges() is None


def test_nvtx_ranges_carry_layer_and_op(monkeypatch):
    opened = []
    fake = type("nvtx", (), {"annotate": staticmethod(lambda text: opened.append(text))})
    monkeypatch.setitem(__import__("sys").modules, "nvtx", fake)
    observer = profile.nvtx_ranges()
    observer(Op("Linear", "backward", "layer 3"))
    observer(Op("", "forward", "layer 0"))
    assert opened == ["layer 3 Linear backward", "layer 0 forward"]
