"""Options in the words of other programs, and one sentence for those that do not exist."""

import re
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Doc

import xtrain.compare
import xtrain.finetune
import xtrain.generate
import xtrain.profile
import xtrain.train
from xtrain import family
from xtrain.config import PRESETS, ModelConfig, ShapeOptions, TrainConfig, resolve
from xtrain.errors import UserError
from xtrain.evaluation.run import Options as EvaluateOptions
from xtrain.export import Options as ExportOptions
from xtrain.inspect.compare import CompareConfig
from xtrain.inspect.profile import Options as ProfileOptions
from xtrain.option_fields import options_of
from xtrain.option_help import GROUPED, grouped, help_text, texts_of
from xtrain.option_words import HINTS, OTHER_NAMES
from xtrain.options import parse, read_arguments
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.report.page import Options as ReportOptions
from xtrain.server.listen import Options as ServeOptions
from xtrain.serving.conversation import Options as ChatOptions
from xtrain.serving.text_generation import Options as GenerateOptions
from xtrain.tuning.finetune import FinetuneConfig
from xtrain.tuning.prefer import PreferConfig

KINDS = (
    TrainConfig, FinetuneConfig, PreferConfig, ReinforceConfig, GenerateOptions, ChatOptions, ServeOptions, EvaluateOptions, ReportOptions,
    CompareConfig, ProfileOptions, ExportOptions,
)  # fmt: skip


def train_options(line):
    return parse(TrainConfig, "train", None, line.split())


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--learning-rate 1e-3 --batch_size 4 --max-steps 1e3", dict(lr=1e-3, batch=4, steps=1000)),
        ("--max_iters=2_000 --block_size=64 --device=cuda", dict(steps=2000, seq_len=64, device="gpu")),
        ("--dtype bfloat16 --run-name a --output-dir b", dict(precision="bf16", name="a", out="b")),
        ("--torch-dtype float32 --grad-clip 0.5 --warmup-steps 1e1", dict(precision="fp32", clip=0.5, warmup=10)),
        ("--n-layer 3 --n-head 2 --n-embd 64", dict(layers=3, heads=2, dim=64)),
        ("--num-hidden-layers 3 --hidden-size 64 --intermediate-size 96", dict(layers=3, dim=64, hidden_dim=96)),
        ("--num-local-experts 8 --num-experts-per-tok 2 --moe-intermediate-size 32 --router-aux-loss-coef 0.1", dict(experts=8, experts_per_token=2, expert_hidden_dim=32, balance_loss=0.1)),
        ("--dataset x.txt --save-steps 5 --eval-interval 6 --wd 0", dict(data="x.txt", save_every=5, eval_every=6, weight_decay=0.0)),
        ("--LR 0.5 --no-graph --seed 3", dict(lr=0.5, graph=False, seed=3)),
        ("--init-from folder --gradient-checkpointing true", dict(init="folder", recompute="block")),
        ("--sample-prompt 1e3 --name 1e3 --steps 5", dict(sample_prompt="1e3", name="1e3", steps=5)),
    ],
)  # fmt: skip
def test_other_words(line, expected):
    assert train_options(line) == TrainConfig(**expected)


def test_words_of_other_commands():
    found = parse(
        GenerateOptions,
        "generate",
        None,
        ["--model-path", "m", "--max-tokens", "5", "--temp", "0.5", "p", "--topk", "3"],
    )
    assert (found.model, found.max_new_tokens, found.temperature, found.top_k) == ("m", 5, 0.5, 3)
    # only one value belongs to an option: the prompts stay as they are
    line = ["--model", "m", "--seed", "1e1", "1e3", "--", "--epochs", "1e3"]
    found = read_arguments(options_of(GenerateOptions), line, {})
    assert found == {"model": "m", "seed": 10, "prompts": ("1e3", "--epochs", "1e3")}


WRONG = {
    # nearly right
    "--stpes 4": "--steps", "--bacth 4": "--batch", "--seqlen 4": "--seq-len", "--presets tiny": "--preset",
    "--learning-rat 1": "--lr", "--warmups 3": "--warmup", "--evaluate-every 3": "--eval-every", "--outt x": "--out",
    "--weight-deacy 0": "--weight-decay", "--betas1 0": "--beta1", "--micro_batchsize 2": "--micro-batch",
    "--eval-intervall 2": "--eval-every", "--num-layer 3": "--layers", "--vocabulary-size 5": "--vocab-size",
    "--tokeniser x": "--tokenizer", "--resum": "--resume", "--no-grahp": "--no-graph", "--percision bf16": "--precision",
    # what xtrain does otherwise
    "--epochs 3": "--steps", "--num_train_epochs=3": "--steps", "--gradient_accumulation_steps 4": "--micro-batch",
    "--gpus 4": "mpirun", "--nproc_per_node 4": "mpirun", "--bf16": "--precision bf16", "--fp16 true": "--precision bf16",
    "--compile": "--graph", "--min-lr 1e-5": "--min-lr-ratio", "--optimizer sgd": "muon", "--num-workers 4": "without workers",
    "--config a.yaml": "a.yaml cannot be read", "--wandb": "--log wandb", "--dropout 0.1": "no dropout", "--cpu": "--device cpu",
    "--lr-scheduler-type cosine": "change_the_model.md",
    # values
    "--dtype fp16": "bf16", "--precision half": "bf16", "--device cuda:1": "CUDA_VISIBLE_DEVICES=1", "--steps 2.5": "whole number",
    "--batch 1.5e0": "whole number", "--layers 0": "--layers must be positive", "--heads 3": "not divisible",
    "--kv-heads 3": "n_kv_heads 3", "--qwertz": "--help lists all",
    "--steps abc": "--steps abc: give a whole number", "--lr fast": "--lr fast: give a number", "--steps": "--steps has no value", "--lr -inf": "if it is to be -inf, write --lr=-inf",
    "--schedule linear": "give one of cosine, wsd", "--zero 2": "give one of 0, 1", "--qk-norm maybe": "give one of true, false",
    "--graph=1": "--graph or --no-graph", "-n 3": "there is no option -n", "words": "'words' belongs to no option",
    "--eval-tasks a --eval-tasks b": "given twice",
    # of transformers' Trainer and others
    "--warmup-ratio 0.1": "number of steps with --warmup", "--logging-steps 5": "metrics.jsonl", "--eval_strategy steps": "--eval-every",
    "--per_device_train_batch_size 4": "--micro-batch", "--optim adamw_torch": "--optimizer", "--lora_r 8": "xtrain finetune --lora",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_one_sentence_with_the_right_word(line, capsys, tmp_path):
    more = ["--data", "tests/data/grammar.txt", "--vocab-size", "300", "--device", "cpu"]
    more = ["--out", str(tmp_path), *(more if "device" not in line else more[:-2])]
    assert xtrain.train.main([*more, *line.split()]) == 2
    err = capsys.readouterr().err
    assert WRONG[line] in err and err.startswith("xtrain.train: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_true_need_not_be_written():
    read = lambda line: parse(TrainConfig, "train", arguments=line.split())
    config = read("--expert-bias --qk-norm false --tie-embeddings")
    assert (config.expert_bias, config.qk_norm, config.tie_embeddings) == (True, False, True)


def test_wrong_words_of_other_commands(capsys):
    for main, line, word in (
        (xtrain.generate.main, "words", "--model is missing: give it (a Hugging Face folder"),
        (xtrain.compare.main, "", "FOLDER is missing"),
        (xtrain.finetune.main, "--num-train-epochs x", "--epochs x: give a number"),
        (xtrain.generate.main, "--temprature 1", "--temperature"),
        (xtrain.generate.main, "--epochs 1", "--steps"),
        (xtrain.compare.main, "--tolerence 1", "--tolerance"),
        (xtrain.profile.main, "--layer 1", "--layers"),
        (xtrain.finetune.main, "--num-experts 8", "the model has its shape: leave it out"),
    ):
        assert main(line.split()) == 2
        assert word in capsys.readouterr().err


@given(st.lists(st.text(), max_size=4))
def test_any_arguments(arguments):
    """Arguments are read or refused by a sentence."""
    try:
        found = read_arguments(options_of(TrainConfig), arguments, {})
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert bool(found) == bool(set(arguments) - {"--"})


def test_every_word_leads_to_an_option():
    known = {name for kind in KINDS for name in options_of(kind)}
    assert set(OTHER_NAMES) <= known
    words = [word for others in OTHER_NAMES.values() for word in others.split()]
    assert not set(words) & set(HINTS)
    named = " ".join(HINTS.values())
    assert set(re.findall("--([a-z][a-z-]*)", named)) <= known


# ----------------------------------------------------------------------------- options from a file
def test_options_from_a_file(tmp_path):
    toml, json = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text(
        '# a comment\nlearning-rate = 1e-2\nsteps = 1e3\ndata = ["x", "y"]\ngraph = false\n'
    )
    json.write_text(
        '{"lr": 0.01, "steps": "1_000", "data": ["x", "y"], "graph": false, "name": null}'
    )
    want = TrainConfig(lr=0.01, steps=1000, data=("x", "y"), graph=False)
    assert train_options(f"--config {toml}") == train_options(f"--config {json}") == want
    found = train_options(f"--steps 5 --config {toml} --data z")  # the command line wins
    assert found == TrainConfig(lr=0.01, steps=5, data=("z",), graph=False)
    default = TrainConfig(seed=3, lr=0.5)
    found = parse(TrainConfig, "train", None, ["--config", str(toml)], default)
    assert (found.seed, found.lr) == (3, 0.01)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"stepss": 4}', "there is no option --stepss: did you mean --steps?"),
        ('{"warmup_ratio": 0.1}', "number of steps with --warmup"),
        ('{"steps": 2.5}', "--steps 2.5: give a whole number"),
        ('{"steps": true}', "--steps cannot be True"),
        ('{"name": 4}', "--name cannot be 4"),
        ('{"lr": {"a": 1}}', "--lr cannot be {'a': 1}"),
        ('{"no-graph": true}', "write graph = false"),
        ('{"steps": null, "seed": null}', "--seed cannot be None"),
        ('["x"]', "must hold a JSON object"),
    ],
)
def test_wrong_options_in_a_file(tmp_path, text, words):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        train_options(f"--config {file}")
    assert str(caught.value).startswith(str(file)) and words in str(caught.value)


def test_not_toml(tmp_path):
    (tmp_path / "a.toml").write_text("lr: 3")
    with pytest.raises(UserError, match=r"a\.toml is not TOML"):
        train_options(f"--config {tmp_path / 'a.toml'}")


def test_a_run_starts_from_the_options_of_another(tmp_path):
    line = "--data tests/data/grammar.txt --vocab-size 300 --batch 2 --steps 2 --eval-batches 1 --seq-len 16 --device cpu --lr 1e-2"
    line += f" --layers 1 --dim 32 --heads 2 --qk-norm False --out {tmp_path}"
    assert xtrain.train.main([*line.split(), "--name", "a", "--stop-at", "1"]) == 0
    again = f"--config {tmp_path / 'a'} --out {tmp_path} --name"
    assert xtrain.train.main([*again.split(), "b"]) == 0  # and not only to step 1
    assert xtrain.train.main([*again.split(), "c", "--batch", "1", "--steps", "1"]) == 0
    a, b, c = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in "abc")
    assert b[0] == a[0] and b[1].startswith('{"step": 2') and c[0] != a[0]


# ----------------------------------------------------------------------------- the shape of a model
def shape(preset="tiny", **given):
    return ShapeOptions(preset, **given).shape(PRESETS[preset])


def test_a_shape_is_the_presets_with_changes():
    assert shape() == PRESETS["tiny"].model
    wide = shape(dim=256)  # heads as wide as before
    assert (wide["n_heads"], wide["head_dim"], wide["hidden_dim"]) == (8, 32, None)
    few = shape("gpt124m", heads=6, qk_norm=False, tie_embeddings=True)
    assert (few["n_heads"], few["head_dim"], few["dim"]) == (6, None, 768)
    assert few["qk_norm"] is False and few["tie_embeddings"] is True
    all_given = dict(dim=96, layers=2, heads=3, kv_heads=1, head_dim=16, hidden_dim=40)
    found = shape(**all_given)
    assert [found[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim")] == [96, 2, 3, 1, 16, 40]  # fmt: skip


def member(**given):
    c, shape = resolve(TrainConfig(**given), gpu=True)
    return c, ModelConfig(vocab_size=c.vocab_size, **shape)


def test_depth_decides_the_other_options():
    c, model = member(depth=12)
    assert (model.n_layers, model.dim, model.n_heads, model.head_dim, model.hidden_dim) == (
        12,
        768,
        12,
        64,
        2048,
    )
    assert family.parameters(model) == 12 * (4 * 768**2 + 3 * 768 * 2048) + 768 * 16384
    assert (c.batch, c.micro_batch, c.seq_len, c.lr, c.name) == (512, 32, 1024, 6e-4, "d12")
    assert abs(c.steps * c.batch * c.seq_len / (20 * family.parameters(model)) - 1) < 1e-3
    sizes = [member(depth=n) for n in (2, 4, 8, 16, 32)]
    assert [m.dim for _, m in sizes] == [128, 256, 512, 1024, 2048]
    assert sorted(c.batch for c, _ in sizes) == [c.batch for c, _ in sizes]
    for c, m in sizes:  # 1 / width and sqrt(batch)
        assert c.lr == pytest.approx(6e-4 * 768 / m.dim * (c.batch / 512) ** 0.5, rel=1e-2)


def test_what_is_given_with_a_depth_wins_and_the_others_follow():
    whole, _ = member(depth=8)
    small, _ = member(depth=8, batch=48, seq_len=512, warmup=3)
    assert (small.batch, small.micro_batch, small.seq_len, small.warmup) == (48, 16, 512, 3)
    assert small.steps == pytest.approx(whole.steps * whole.batch * 1024 / (48 * 512), rel=1e-3)
    assert small.lr == pytest.approx(whole.lr * (48 * 512 / (whole.batch * 1024)) ** 0.5, rel=1e-2)
    short, _ = member(depth=8, steps=20)
    assert (short.steps, short.lr, short.eval_every, short.warmup) == (20, whole.lr, 1, 0)
    wide, model = member(depth=8, dim=768, vocab_size=1000)
    assert model.dim == 768 and wide.lr < whole.lr and wide.vocab_size == 1000
    assert resolve(TrainConfig(depth=12), True, world=64)[0].micro_batch == 8  # 512 / 64
    again, _ = member(**vars(whole))  # as on --resume, where all of them are given
    assert again == whole


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(preset="tiny", resume=True), "a resumed run keeps: omit --depth"),
        (dict(preset="tiny"), "give neither --preset nor --init"),
        (dict(init="folder"), "give neither --preset nor --init"),
        (dict(depth=0), "--depth must be positive"),
        (dict(depth=129), "--depth must be at most 128"),
    ],
)
def test_a_depth_that_cannot_be(given, words):
    with pytest.raises(UserError, match=words):
        resolve(TrainConfig(**({"depth": 4} | given)), gpu=False)


def test_a_shape_belongs_to_a_new_model():
    with pytest.raises(UserError, match="--dim, --layers cannot be given with --init"):
        resolve(TrainConfig(init="somewhere", dim=64, layers=2), False)


def test_a_run_of_another_shape_is_resumed_with_it(tmp_path, capsys):
    line = "--data tests/data/grammar.txt --vocab-size 300 --batch 2 --steps 2 --warmup 0 --eval-batches 1 --seq-len 16 --device cpu"
    line += f" --layers 1 --dim 32 --heads 2 --qk-norm False --out {tmp_path}"
    assert xtrain.train.main(line.split()) == 0
    assert xtrain.train.main(f"--resume --steps 4 --allow-change steps --device cpu --out {tmp_path}".split()) == 0  # fmt: skip
    assert "Llama-style, 1 layers, width 32, 2 heads x 16" in capsys.readouterr().out
    assert xtrain.train.main(f"--resume --dim 64 --device cpu --out {tmp_path}".split()) == 2
    assert "dim was 32, is 64" in capsys.readouterr().err


# ----------------------------------------------------------------------------- resuming
TRAINING = (TrainConfig, FinetuneConfig, PreferConfig, ReinforceConfig)
# what a run writes, where and when, how it ends, and what must not change a bit
OF_THE_PROCESS = """
name out log debug keep best patience resume allow_change stop_at time_limit max_skips spike_z show
eval_every eval_batches eval_tasks eval_tasks_every eval_items sample_every sample_prompt
sample_tokens save_every rollouts_every recompute graph rollout_batch zero dp bucket_mb transport
check_ranks watchdog reward_timeout reward_errors"""
# what decides data, tokenizer, model, reference, teacher or threads: the checkpoint records those
RECORDED = """
data text_key strict_data verify_data vocab_size tokenizer val_data val_share mix bad_records
too_long train_answers pack epochs chat_template chat_template_kwargs device blas_threads
init preset depth dim layers heads kv_heads head_dim hidden_dim qk_norm tie_embeddings
experts experts_per_token expert_hidden_dim expert_bias draft_heads teacher reference
lora lora_alpha lora_targets lora_rank_pattern lora_alpha_pattern lora_rslora lora_dora lora_bias
lora_modules_to_save lora_init"""
NOT_COMPARED = {*OF_THE_PROCESS.split(), *RECORDED.split()}


@pytest.mark.parametrize("kind", TRAINING)
def test_an_option_decides_the_numbers_or_is_known_not_to(kind):
    undecided = {field.name for field in fields(kind)} - {*kind().resume_keys()} - NOT_COMPARED
    assert not undecided, (
        f"{undecided}: if it decides the numbers of a run, add it to RESUME_KEYS "
        "(xtrain/run_options.py) or the command's resume_keys, else to a list above"
    )


def test_options_that_are_not_compared_exist():
    assert {field.name for kind in TRAINING for field in fields(kind)} >= NOT_COMPARED


# ----------------------------------------------------------------------------- --help
LONGEST_GROUP = 16  # options


def test_help_has_groups_with_every_option_once():
    for kind in KINDS:
        groups = grouped(options_of(kind))
        names = [name for group in groups.values() for name in group]
        assert sorted(names) == sorted(options_of(kind))
        if len(names) > GROUPED:
            ungrouped = groups.pop("options")
            assert not ungrouped, f"{ungrouped}: add it to GROUPS in xtrain/option_help.py"
            long = [title for title, group in groups.items() if len(group) > LONGEST_GROUP]
            assert not long, f"{long}: divide it, a reader finds nothing among so many"
    text = help_text(TrainConfig, "train", "What it does.")
    assert (
        text.index("the learning rate:")
        < text.index("  --lr FLOAT  ")
        < text.index("--weight-decay")
    )
    assert "seed of initialisation, batches and samples (default: 0)\n" in text


def test_help_without_a_terminal_is_one_line_per_option_and_fits_a_terminal(monkeypatch):
    lines = help_text(TrainConfig, "train", "About.").splitlines()
    assert len([x for x in lines if x.startswith("  --")]) == len(options_of(TrainConfig)) + 1
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, help_text(TrainConfig, "train", "About.").splitlines())) <= 70


@dataclass(frozen=True)
class Commented:
    above: int = 0
    # two lines
    # above it
    behind: int = 1
    same: int = 2  # on its line
    below: int = 3
    """A string
    below it."""
    doc: Annotated[int, Doc("a Doc")] = 4


def test_texts_of_fields():
    assert texts_of(Commented) == {
        "above": "", "behind": "two lines above it", "same": "on its line", "below": "A string below it.", "doc": "a Doc",
    }  # fmt: skip
