"""--change MODULE:FUNCTION: a model changed by the user's code, in every command; and what is refused."""

import importlib
import json

import numpy as np
import pytest
from runs import SILENT, metrics
from twins import small

from xtrain import (
    TrainConfig,
    Transformer,
    UserError,
    chat,
    evaluate,
    export,
    finetune,
    generate,
    profile,
)
from xtrain import reinforce as reinforce_command
from xtrain.options import find_function
from xtrain.report.page import look_at_text
from xtrain.serving import pretrained
from xtrain.train import train

CODE = """
from xtrain.nn import functional as F
from xtrain.nn.model import STD
from xtrain.nn.modules import Linear, Module


class PlainMLP(Module):
    def __init__(self, c):
        self.up_proj, self.down_proj = Linear(c.dim, 2 * c.dim, STD), Linear(2 * c.dim, c.dim, STD)

    def __call__(self, x_NC):
        return self.down_proj(F.silu(self.up_proj(x_NC)))


def all_layers(model):
    return in_layers(model, model.model.layers)


def one_layer(model):
    return in_layers(model, model.model.layers[:1])


def in_layers(model, layers):
    for layer in layers:
        layer.mlp = PlainMLP(model.config)
    model.renew_arena()
    return model


def forgotten(model):
    all_layers(model)


number = 3
"""
CHANGE = "changed_code:all_layers"
WITH = ["--change", CHANGE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the code, a run of a changed model ("mine", interrupted and resumed; "whole") and one of a plain model."""
    folder = tmp_path_factory.mktemp("changed")
    (folder / "changed_code.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        options = dict(
            preset="tiny", data="tests/data/grammar.txt", out=str(folder), steps=6, batch=4, seq_len=32, warmup=1, layers=2,
            vocab_size=300, eval_every=9, sample_every=9, save_every=3, device="cpu", blas_threads=1,
        )  # fmt: skip
        train(TrainConfig(**options, name="whole", change=CHANGE), SILENT)
        train(TrainConfig(**options, name="mine", change=CHANGE, stop_at=3), SILENT)
        train(TrainConfig(**options, name="plain"), SILENT)
        yield folder


def run(capsys, main, *arguments):
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_changed_model_trains_resumes_tunes_and_serves_with_one_option(runs, tmp_path, capsys):
    from xtrain.train import main as train_main

    assert train_main(["--out", str(runs), "--name", "mine", "--resume"]) == 0  # the option is kept
    assert f"--model {runs / 'mine'} --change {CHANGE}" in capsys.readouterr().out
    losses = [
        [x["loss"] for x in metrics(runs / name) if "loss" in x] for name in ("mine", "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6

    code, text, _ = run(
        capsys, generate.main, "--model", runs / "mine", *WITH, "The ", "--max-new-tokens", 5
    )
    assert code == 0 and text.startswith("The ")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(json.dumps({"prompt": f"p {i}", "completion": "x y"}) + "\n" for i in range(6))
    )
    common = ["--out", tmp_path, "--batch", 2, "--steps", 2, "--device", "cpu", *WITH]
    tuned = [finetune.main, "--init", runs / "mine", "--data", chats, *common]
    assert run(capsys, *tuned, "--name", "full")[0] == 0
    assert run(capsys, *tuned, "--name", "lora", "--lora", 4)[0] == 0
    adapter = json.loads(
        next((tmp_path / "lora" / "checkpoints").glob("*/adapter_config.json")).read_text()
    )
    assert adapter["r"] == 4
    merged = tmp_path / "merged"
    assert run(capsys, export.main, "--model", tmp_path / "lora", "--merge", merged, *WITH)[0] == 0
    loaded = [
        Transformer.from_pretrained(f, trainable=False, change=CHANGE)
        for f in (tmp_path / "lora", merged)
    ]
    ids = np.arange(12)[None]
    assert np.array_equal(loaded[0](ids).data, loaded[1](ids).data)
    (tmp_path / "task.py").write_text(
        "def reward(record, completions):\n    return [len(c) for c in completions]\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        rewarded = [
            "--init",
            tmp_path / "full",
            "--data",
            prompts,
            "--task",
            "task:reward",
            "--name",
            "rl",
            "--kl",
            0.1,
        ]
        code, _, err = run(capsys, reinforce_command.main, *rewarded, *common[:2], "--batch", 4, "--group", 2, *common[4:], "--max-new-tokens", 4)  # fmt: skip
        assert code == 0, err
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"prompt": "a", "choices": ["b", "c"], "answer": 0}) + "\n")
    assert run(capsys, evaluate.main, "--model", tmp_path / "rl", *WITH, "--tasks", items)[0] == 0
    assert run(capsys, chat.main, "--model", tmp_path / "rl")[0] == 2
    assert look_at_text(runs / "mine", "The", print)["attention"]


def test_a_changed_model_is_the_same_after_reading(runs):
    model = Transformer.from_pretrained(runs / "whole", change=CHANGE)
    assert model.change == CHANGE and "PlainMLP" in model.variation
    served = pretrained.load(runs / "whole", "cpu", change=CHANGE).model
    code = find_function("--change", CHANGE, "")
    same = Transformer.from_pretrained(runs / "whole", change=code)
    built = code(Transformer(model.config, 5))
    built.load_weights(runs / "whole")
    ids = np.arange(20)[None]
    for other in (served, same, built):
        assert np.array_equal(other(ids).data, model(ids).data)


def test_a_plain_model_may_be_changed_where_it_is_trained(runs, capsys):
    """New matrices are new, the others are the folder's; for serving, the folder must have all."""
    model = Transformer.from_pretrained(runs / "plain", change=CHANGE)
    plain = dict(Transformer.from_pretrained(runs / "plain").named_parameters())
    for name, tensor in model.named_parameters():
        if ".mlp." in name:
            assert tensor.data.shape != plain[name].data.shape and 0.01 < tensor.data.std() < 0.03
        else:
            assert np.array_equal(tensor.data, plain[name].data)
    code, _, err = run(capsys, generate.main, "--model", runs / "plain", *WITH, "The")
    assert code == 2 and "the weights do not fit config.json" in err


def test_new_parameters_follow_the_seed_of_the_run(runs):
    def made(seed):
        model = Transformer(small(), seed).changed(find_function("--change", CHANGE, ""))
        return dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].data

    a, again, b = made(1), made(1), made(2)
    assert np.array_equal(a, again) and not np.array_equal(a, b)


REFUSED = {
    "no option": ([], f"was changed by {CHANGE}: add --change {CHANGE}"),
    "another change": (["--change", "changed_code:one_layer"], "than this change makes"),
    "no colon": (["--change", "changed_code"], "must be MODULE:FUNCTION, such as my_model:change"),
    "no module": (["--change", "no_code:f"], "there is no such module here"),
    "no function": (["--change", "changed_code:number"], "has no function 'number'"),
    "returns nothing": (
        ["--change", "changed_code:forgotten"],
        "returned NoneType: return the model",
    ),
}


@pytest.mark.parametrize("given, says", REFUSED.values(), ids=REFUSED)
def test_one_sentence_says_what_is_wrong(runs, capsys, given, says):
    code, out, err = run(capsys, generate.main, "--model", runs / "whole", "The", *given)
    assert code == 2 and says in err and out == "" and len(err.strip().splitlines()) == 1


def test_a_resumed_run_keeps_its_change(runs):
    given = dict(
        out=str(runs),
        name="whole",
        resume=True,
        steps=9,
        allow_change=("steps",),
        data="tests/data/grammar.txt",
    )
    with pytest.raises(UserError, match="change"):
        train(TrainConfig(**given, change="changed_code:one_layer", device="cpu"), SILENT)


def test_other_programs_and_plans_refuse_it(runs, capsys, tmp_path):
    code, _, err = run(
        capsys, export.main, "--model", runs / "whole", "--gguf", tmp_path / "x.gguf"
    )
    assert code == 2 and "that other programs do not have" in err
    assert run(capsys, profile.main, "--run", runs / "whole", "--plan")[0] == 2
