"""Options in the words of other programs, and one sentence for those that do not exist."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xtrain.compare
import xtrain.generate
import xtrain.profile
import xtrain.train
from xtrain.config import PRESETS, ShapeOptions, TrainConfig, resolve
from xtrain.errors import UserError
from xtrain.options import HINTS, OTHER_NAMES, parse, translated
from xtrain.serving.text_generation import Options as GenerateOptions


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
    assert translated(GenerateOptions, line) == ["--model", "m", "--seed", "10", *line[4:]]


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
    "--compile": "--graph", "--min-lr 1e-5": "--min-lr-ratio", "--optimizer sgd": "muon", "--num-workers 4": "no workers",
    "--config a.yaml": "command line", "--wandb": "--log wandb", "--dropout 0.1": "no dropout", "--cpu": "--device cpu",
    "--lr-scheduler-type cosine": "change_the_model.md",
    # values
    "--dtype fp16": "bf16", "--precision half": "bf16", "--device cuda:1": "CUDA_VISIBLE_DEVICES=1", "--steps 2.5": "whole number",
    "--batch 1.5e0": "whole number", "--layers 0": "--layers must be positive", "--heads 3": "not divisible",
    "--kv-heads 3": "n_kv_heads 3", "--qwertz": "--help lists all",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_one_sentence_with_the_right_word(line, capsys, tmp_path):
    more = ["--data", "tests/data/grammar.txt", "--vocab-size", "300", "--device", "cpu"]
    more = ["--out", str(tmp_path), *(more if "device" not in line else more[:-2])]
    assert xtrain.train.main([*more, *line.split()]) == 2
    err = capsys.readouterr().err
    assert WRONG[line] in err and err.startswith("xtrain.train: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_wrong_words_of_other_commands(capsys):
    for main, line, word in (
        (xtrain.generate.main, "--temprature 1", "--temperature"),
        (xtrain.generate.main, "--epochs 1", "--steps"),
        (xtrain.compare.main, "--tolerence 1", "--tolerance"),
        (xtrain.profile.main, "--layer 1", "--layers"),
    ):
        assert main(line.split()) == 2
        assert word in capsys.readouterr().err


@given(st.lists(st.text(), max_size=4))
def test_any_arguments(arguments):
    """Arguments are translated or refused by a sentence."""
    try:
        found = translated(TrainConfig, arguments)
    except UserError as error:
        assert "\n" not in str(error) or "\n" in "".join(arguments)
    else:
        assert len(found) == len(arguments)


def test_every_word_leads_to_an_option():
    known = {f.name.replace("_", "-") for f in dataclasses.fields(TrainConfig)}
    known |= {f.name.replace("_", "-") for f in dataclasses.fields(GenerateOptions)}
    assert set(OTHER_NAMES) <= known
    words = [word for others in OTHER_NAMES.values() for word in others.split()]
    assert not set(words) & set(HINTS)


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
