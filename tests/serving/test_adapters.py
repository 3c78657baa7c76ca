"""Several adapters in one batch: each answer is that of a model with the adapter merged; no keys and values are shared."""

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from twins import random_model, small

from xtrain import Engine, UserError
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats.adapters import ADAPTER_WEIGHTS, PREFIX, read_adapters, write_adapters
from xtrain.formats.tensor_file import write_safetensors
from xtrain.nn.model import Transformer
from xtrain.nn.tensor import Tensor
from xtrain.serving.adapters import SwitchedLinear, add_adapters

TARGETS = {"a": ("q_proj", "v_proj", "down_proj"), "b": ("o_proj", "gate_proj", "k_proj")}
OPTIONS = dict(max_batch=4, max_seq_len=256)


def folders(tmp_path, **changes):
    """Folders of a model and of two adapters with different ranks and targets."""
    tokenizer = Tokenizer.train(["def f(x):\n    return x + größe\n" * 50], 290)
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=256, head_dim=16, **changes)
    random_model(config, device="cpu").save_pretrained(tmp_path / "base", tokenizer)
    model = Transformer.from_pretrained(tmp_path / "base")
    shapes = {name: x.shape for name, x in model.named_parameters()}
    found = {}
    for rank, (name, targets) in enumerate(TARGETS.items(), 2):
        rng = np.random.default_rng(rank)
        tensors = {}
        for path, shape in shapes.items():
            target = path.removesuffix(".weight")
            if target.rpartition(".")[2] in targets:
                a, b = rng.normal(0, 0.5, (rank, shape[1])), rng.normal(0, 0.5, (shape[0], rank))
                tensors[f"{target}.lora_A.weight"] = Tensor(a.astype(np.float32))
                tensors[f"{target}.lora_B.weight"] = Tensor(b.astype(np.float32))
        found[name] = tmp_path / name
        found[name].mkdir()
        about = {"base_model_name_or_path": str(tmp_path / "base"), "r": rank, "lora_alpha": 3.0}
        write_adapters(found[name], tensors, about | {"target_modules": list(targets)})
    return tmp_path / "base", found


PROMPTS = [list(range(5, 105)), list(range(5, 105)), [7, 8], list(range(5, 40))]


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_answers_are_those_of_merged_models(tmp_path, weights):
    base, adapters = folders(tmp_path)
    options = dict(max_new_tokens=9, logprobs=2, temperature=0.8, seed=3)
    wanted = {}
    for name, folder in {None: base, **adapters}.items():
        alone = Engine(Transformer.from_pretrained(folder, trainable=False), **OPTIONS)
        wanted[name] = alone.generate(PROMPTS, **options)
    assert len({str(list(map(list, answers))) for answers in wanted.values()}) == 3
    model = Transformer.from_pretrained(base, trainable=False)
    plain = dict(model.named_parameters()).keys()
    add_adapters(model, adapters)
    assert dict(model.named_parameters()).keys() == plain
    engine = Engine(model, **OPTIONS, weights=weights)
    for _ in range(2):  # then what an adapter has computed is in the cache
        streams = {name: engine.stream(PROMPTS, adapter=name, **options) for name in wanted}
        engine._compute([r for stream in streams.values() for r in stream.requests])  # together
        for name, stream in streams.items():
            if weights == "int8":  # the product of w is another one
                continue
            assert [*map(list, stream.completions)] == [*map(list, wanted[name])], name
            for one, other in zip(stream.completions, wanted[name]):
                values = [[value for value, _ in x.logprobs] for x in (one, other)]
                np.testing.assert_allclose(*values, atol=2e-5)
        assert len({str([*map(list, s.completions)]) for s in streams.values()}) == 3
    shared = [[c.reused for c in stream.completions] for stream in streams.values()]
    assert all(reused[0] > 60 for reused in shared)
    assert engine.scheduler.pool.available == engine.scheduler.pool.size


def test_passes_after_an_engine_are_those_of_the_model(tmp_path):
    base, adapters = folders(tmp_path)
    model = Transformer.from_pretrained(base, trainable=False)
    ids = np.array([PROMPTS[3]], np.int32)
    wanted = model(ids).data
    add_adapters(model, adapters)
    answers = [Engine(model, **OPTIONS).generate(PROMPTS, 5, adapter="a") for _ in range(2)]
    assert list(answers[0][0]) == list(answers[1][0])
    np.testing.assert_array_equal(model(ids).data, wanted)


def test_adapters_of_weights_that_are_multiplied_when_they_are_read(tmp_path):
    """Granite's."""
    base, adapters = folders(tmp_path, qk_norm=False)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    config |= {"attention_multiplier": 0.1, "residual_multiplier": 0.3, "logits_scaling": 2.0}
    (base / "config.json").write_text(json.dumps(config))
    model = Transformer.from_pretrained(base, trainable=False)
    add_adapters(model, adapters)
    engine = Engine(model, **OPTIONS)
    for name, folder in adapters.items():
        alone = Engine(Transformer.from_pretrained(folder, trainable=False), **OPTIONS)
        (want,) = alone.generate(PROMPTS[:1], 9, logprobs=0)
        (found,) = engine.generate(PROMPTS[:1], 9, logprobs=0, adapter=name)
        values = [[value for value, _ in x.logprobs] for x in (found, want)]
        np.testing.assert_allclose(*values, atol=2e-5)


def test_a_thread_has_the_rows_of_its_own_pass(tmp_path):
    """Another engine's, or those of the model alone, may be computed at the same time."""
    base, adapters = folders(tmp_path)
    model = Transformer.from_pretrained(base, trainable=False)
    ids = np.array([PROMPTS[3]], np.int32)
    wanted = model(ids).data
    add_adapters(model, adapters)
    runner = Engine(model, **OPTIONS).runner
    with ThreadPoolExecutor(1) as other, runner.mode():
        runner.use_adapters(np.zeros(ids.size, np.int32))
        found = other.submit(lambda: model(ids).data).result()
        assert not np.allclose(model(ids).data, wanted)
    np.testing.assert_array_equal(found, wanted)
    assert copy.deepcopy(model).adapters.names == ["a", "b"]


def test_drafts_are_verified_with_the_adapter(tmp_path):
    base, adapters = folders(tmp_path)
    model = Transformer.from_pretrained(base, trainable=False)
    add_adapters(model, adapters)
    prompt = [[5, 6, 7] * 20]
    options = dict(max_new_tokens=20, adapter="a")
    (plain,) = Engine(model, **OPTIONS).generate(prompt, **options)
    (drafted,) = Engine(model, **OPTIONS, speculate=3).generate(prompt, **options)
    assert list(drafted) == list(plain)


def test_what_does_not_fit_is_refused(tmp_path):
    base, adapters = folders(tmp_path)
    model = Transformer.from_pretrained(base, trainable=False)
    odd = tmp_path / "odd"
    shutil.copytree(adapters["a"], odd)
    lost = "model.layers.0.self_attn.q_proj.lora_B.weight"
    rest = {PREFIX + name: x for name, x in read_adapters(odd).items() if name != lost}
    tensors = {name: Tensor(x.read_finite()) for name, x in rest.items()}
    write_safetensors(odd / ADAPTER_WEIGHTS, tensors)
    with pytest.raises(UserError, match=r"adapters model\.layers\.0\.self_attn\.q_proj\.lora_A"):
        add_adapters(model, {"x": odd})
    with pytest.raises(UserError, match="holds no adapters of PEFT"):
        add_adapters(model, {"x": base})
    other = random_model(small(vocab_size=307, hidden_dim=48, head_dim=16), device="cpu")
    with pytest.raises(UserError, match=r"the adapters do not fit the model: model\.layers\.0"):
        add_adapters(other, adapters)
    shallow = random_model(small(vocab_size=307, n_layers=1, head_dim=16), device="cpu")
    with pytest.raises(UserError, match=r"no matrices for the adapters model\.layers\.1"):
        add_adapters(shallow, adapters)
    for unchanged in (other, shallow):
        layers = unchanged.model.layers
        kinds = [type(x) for layer in layers for _, m in layer.modules() for x in vars(m).values()]
        assert unchanged.adapters is None and SwitchedLinear not in kinds
    early = Engine(model, **OPTIONS)
    add_adapters(model, {"a": adapters["a"]})
    with pytest.raises(UserError, match=r"no adapter 'a': .* before the engine is made"):
        early.generate([[5]], adapter="a")
    with pytest.raises(UserError, match="the model has the adapters a already: add all at once"):
        add_adapters(model, {"b": adapters["b"]})
    with pytest.raises(UserError, match="there is no adapter 'x'"):
        Engine(model, **OPTIONS).generate([[5]], adapter="x")


def test_clients_choose_an_adapter_by_name(tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    pytest.importorskip("llguidance")
    from xtrain.server.app import create_app
    from xtrain.server.listen import adapter_folders
    from xtrain.serving import pretrained

    base, adapters = folders(tmp_path)
    p = pretrained.load(base, "cpu")
    given = [f"{name}={folder}" for name, folder in adapters.items()]
    add_adapters(p.model, adapter_folders(given, "base"))
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "prompt_logprobs": 0}
    texts = {}
    with testclient.TestClient(create_app(Engine(p.model, **OPTIONS), p, "base")) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("base", None), ("a", "base"), ("b", "base")
        ]  # fmt: skip
        for name in ("base", "a", "b"):
            answer = client.post("/v1/completions", json=body | {"model": name}).json()
            assert answer["model"] == name
            texts[name] = answer["choices"][0]
        error = client.post("/v1/completions", json=body | {"model": "c"}).json()["error"]
        assert error["message"] == "there is no model 'c' here: use 'base', 'a', 'b'", error
    for name, folder in adapters.items():
        engine = Engine(Transformer.from_pretrained(folder, trainable=False), **OPTIONS)
        (want,) = engine.generate([body["prompt"]], 9, stop=p.stop)
        assert texts[name]["text"] == p.tokenizer.decode(want)
        (scores,) = engine.logprobs([body["prompt"]])
        found = [next(iter(x.values()))["logprob"] for x in texts[name]["prompt_logprobs"][1:]]
        assert found == pytest.approx(scores.logprobs.tolist(), abs=2e-5)
    for wrong in ("a", "=x", "base=x", "x="):
        with pytest.raises(UserError, match=r"must be NAME=FOLDER|another model has this name"):
            adapter_folders([wrong], "base")
