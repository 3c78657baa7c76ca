"""--change MODULE:FUNCTION: a model changed by the user's code, in every command; and what is refused."""

import functools
import importlib
import json

import numpy as np
import pytest
from runs import SILENT, metrics
from twins import small

from xtrain import (
    Engine,
    TrainConfig,
    Transformer,
    UserError,
    chat,
    compare,
    evaluate,
    export,
    finetune,
    generate,
    profile,
)
from xtrain import reinforce as reinforce_command
from xtrain import train as train_command
from xtrain.nn import functional as F
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.options import find_function
from xtrain.report.page import look_at_text
from xtrain.serving import pretrained
from xtrain.train import train

CODE = """
from dataclasses import replace

from xtrain import Transformer
from xtrain.nn import functional as F
from xtrain.nn.model import MLP, STD, Attention
from xtrain.nn.modules import Linear, Module, Parameter
from xtrain.nn.sequences import RotaryTables


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


def wide(model):
    for layer in model.model.layers:
        layer.mlp = MLP(replace(model.config, hidden_dim=2 * model.config.hidden_dim))
    model.renew_arena()
    return model


def other_eps(model):
    model.model.layers[1].input_layernorm.eps = 0.5
    return model


def without_rope(model):
    attention = model.model.layers[0].self_attn
    attention.attend = lambda s, qkv: Attention.attend(attention, s.unrotated(), qkv)
    return model


def identity_mlp(model):
    class Zero(MLP):
        def __call__(self, x_NC):
            return 0.0 * super().__call__(x_NC)

    model.model.layers[0].mlp.__class__ = Zero
    return model


def other_angles(model):
    model.rotary = RotaryTables(replace(model.config, rope_theta=100.0), model.device)
    return model


class Doubled(Transformer):
    def logits(self, x_NC):
        return super().logits(x_NC) * 2.0


def doubled(model):
    model.__class__ = Doubled
    return model


def instance_logits(model):
    model.logits = lambda x_NC: Transformer.logits(model, x_NC) * 2.0
    return model


class WithGain(Transformer):
    def loss(self, ids, targets, inv_count=None, starts=None):
        return super().loss(ids, targets, inv_count, starts)


def extra_parameter(model):
    model.__class__, model.gain = WithGain, Parameter((3,), None, {"gain": 3})
    model.renew_arena()
    return model


def forgotten(model):
    all_layers(model)


def another(model):
    return Transformer(model.config)


def other_config(model):
    model.config = replace(model.config, norm_eps=0.5)
    return model


def fails(model):
    return model.nothing


class ArrayMLP(PlainMLP):
    def __call__(self, x_NC):
        return x_NC.data @ self.up_proj.weight.data[: x_NC.shape[1]].T


def with_arrays(model):
    model.model.layers[1].mlp = ArrayMLP(model.config)
    model.renew_arena()
    return model


def frozen(model):
    for _, parameter in model.storage():
        parameter.requires_grad = False
    return model


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


DIFFERENT = {
    "wide": "model.layers.0.mlp.down_proj.weight",
    "other_eps": "model.layers.1.input_layernorm.eps",
    "without_rope": "model.layers.0.self_attn.attend",
    "identity_mlp": "model.layers.0.mlp.Zero",
    "other_angles": "rotary",
    "doubled": "logits of Doubled",
    "instance_logits": "logits of Transformer",
    "extra_parameter": "gain",
}


@pytest.mark.parametrize("name, says", DIFFERENT.items(), ids=DIFFERENT)
def test_whatever_makes_the_model_compute_something_else_is_found(runs, tmp_path, name, says):
    """A plain folder would be read without the change: another model. Loss, logits and engine all run the change."""
    model = Transformer(small(), 3)
    plain = Transformer(small(), 3)
    assert not model.variation
    ids = np.arange(12)[None] % 7
    model.changed(f"changed_code:{name}")
    assert model.variation.startswith(says)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=f"add --change changed_code:{name}"):
        Transformer.from_pretrained(tmp_path / "m")
    again = Transformer.from_pretrained(tmp_path / "m", change=f"changed_code:{name}")
    logits = model(ids)
    assert np.array_equal(again(ids).data, logits.data)
    expected = F.cross_entropy(
        logits.reshape(12, -1), ids.reshape(-1), model.config.vocab_size, np.float32([1 / 12])
    )
    assert abs(model.loss(ids, ids).item() - expected.item()) < 1e-5
    greedy = Engine(again).generate([[1, 2, 3]], 5)[0]
    assert list(greedy) == model.generate(np.array([1, 2, 3]), 5)[3:].tolist()
    if name not in ("wide", "extra_parameter"):  # wide: new weights
        assert abs(logits.data - plain(ids).data).max() > 1e-5


def test_an_engine_refuses_angles_that_it_would_not_use():
    class Shifted(Transformer):
        def sequences(self, B, T):
            return super().sequences(B, T).unrotated()

    with pytest.raises(UserError, match="change `attend` of the attentions instead"):
        Engine(Shifted(small()))


def test_adapters_of_a_derived_class(runs, tmp_path):
    """--change that sets __class__ leaves the model one with adapters."""
    model = AdaptedTransformer(small(), 1, trainable=False).changed("changed_code:doubled")
    before = model(np.arange(6)[None]).data
    model.adapt(Lora(2, 4.0))
    assert np.array_equal(model(np.arange(6)[None]).data, before)
    plain = Transformer(small(), 1)(np.arange(6)[None]).data
    assert np.array_equal(before, 2 * plain)
    assert all("lora" in name for name, _ in model.named_parameters())


def test_the_name_of_a_function_that_cannot_be_imported_is_not_saved(tmp_path):
    def local(model):
        model.model.norm.eps = 0.5
        return model

    for function in (local, functools.partial(local), lambda model: local(model)):
        model = Transformer(small()).changed(function)
        assert model.change == "" and model.variation
        model.save_pretrained(tmp_path / "m")
        with pytest.raises(UserError, match="give the function that changes a plain model into it"):
            Transformer.from_pretrained(tmp_path / "m")
        Transformer.from_pretrained(tmp_path / "m", change=function)


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
    "a file": (
        ["--change", "changed_code.py:all_layers"],
        "must be MODULE:FUNCTION, such as my_model:change",
    ),
    "no module": (["--change", "no_code:f"], "there is no such module here"),
    "no function": (["--change", "changed_code:number"], "has no function 'number'"),
    "returns nothing": (
        ["--change", "changed_code:forgotten"],
        "returned NoneType: change the model that it gets",
    ),
    "another model": (
        ["--change", "changed_code:another"],
        "returned another model: change the model that it gets",
    ),
    "another config": (["--change", "changed_code:other_config"], "replaced model.config"),
    "fails": (
        ["--change", "changed_code:fails"],
        "raised AttributeError ('Transformer' object has no attribute 'nothing') at changed_code.py:",
    ),
}


@pytest.mark.parametrize("given, says", REFUSED.values(), ids=REFUSED)
def test_one_sentence_says_what_is_wrong(runs, capsys, given, says):
    code, out, err = run(capsys, generate.main, "--model", runs / "whole", "The", *given)
    assert code == 2 and says in err and out == "" and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "function, says",
    [
        ("with_arrays", "ArrayMLP returned ndarray, through which no gradient flows"),
        ("frozen", "requires_grad is False for all of them: leave at least one as it is"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(runs, tmp_path, capsys, function, says):
    shape = ["--preset", "tiny", "--batch", 1, "--seq-len", 8, "--steps", 1, "--vocab-size", 300]
    given = ["--data", "tests/data/grammar.txt", "--out", tmp_path, "--change"]
    code, _, err = run(capsys, train_command.main, *shape, *given, f"changed_code:{function}")
    assert code == 2 and says in err and len(err.strip().splitlines()) == 1


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
    code, _, err = run(capsys, compare.main, runs / "whole")
    assert code == 2 and "that other programs do not have" in err  # it has no --change
    assert run(capsys, profile.main, "--run", runs / "whole", "--plan")[0] == 2
