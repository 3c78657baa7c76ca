"""xtrain.torch.apply on tiny random models of transformers: the same loss and gradients as without it."""

import copy
import functools
import inspect
import io

import accelerate
import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.state import AcceleratorState
from checks import assert_as_good

import xtrain.torch as xt
from xtrain.errors import UserError
from xtrain.torch.attention import transformers_attention as attend

SHAPE = dict(
    vocab_size=40, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 5}),
    "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, {"partial_rotary_factor": 0.5}),
    "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM, {"head_dim": 16}),
    "gemma3": (
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
        },
    ),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, {}),
}
B, T = 2, 12
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
places = pytest.mark.parametrize("place", ["cpu", GPU])
families = pytest.mark.parametrize("family", MODELS)


@functools.cache
def weights(family):
    config, kind, options = MODELS[family]
    torch.manual_seed(0)
    model = kind(config(**SHAPE, **options))
    return {k: v + 0.05 * torch.randn_like(v) for k, v in model.state_dict().items()}


def new(family, place="cpu", dtype=torch.float32):
    config, kind, options = MODELS[family]
    model = kind(config(**SHAPE, **options)).train()
    model.load_state_dict(weights(family))
    return model.to(place, dtype)


def batch(place="cpu"):
    ids = torch.randint(3, 40, (B, T), generator=torch.Generator().manual_seed(1)).to(place)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def run(model, **inputs):
    """Loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(ours, theirs):
    """Each is as close as 1e-5 of its largest value."""
    assert len(ours) == len(theirs) > 5
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs))


@families
@places
def test_loss_and_gradients(family, place):
    model, inputs = new(family, place), batch(place)
    before = run(model, **inputs)
    assert xt.apply(model) is model
    ours = run(model, **inputs)
    close(ours, before)
    assert not same(ours, before)  # something else has computed them
    assert same(run(model, **inputs), ours)
    assert model(**inputs).logits is None
    assert model(input_ids=inputs["input_ids"]).logits.shape == (B, T, 40)
    assert xt.revert(model) is model
    assert same(run(model, **inputs), before)
    assert not any("forward" in vars(module) for module in model.modules())


@families
@places
def test_bf16(family, place):
    """The error against float32 is at most twice that of the model without xtrain."""
    exact = run(new(family, place), **batch(place))
    plain, ours = new(family, place, torch.bfloat16), new(family, place, torch.bfloat16)
    xt.apply(ours)
    found = [run(model, **batch(place)) for model in (ours, exact and plain)]
    numbers = lambda xs: torch.cat(
        [x.float().flatten() / (x.float().norm() + 1e-3) for x in xs]
    ).cpu()
    assert_as_good(numbers(found[0]).numpy(), numbers(exact).numpy(), numbers(found[1]).numpy())


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
@places
def test_padding(family, place):
    model, inputs = new(family, place), batch(place)
    mask = torch.ones(B, T, dtype=torch.long, device=place)
    mask[0, :4] = 0
    mask[1, 9:] = 0
    inputs["labels"][mask == 0] = -100
    inputs["labels"][0, 4] = -100  # what padding predicts
    expected = run(model, attention_mask=mask, **inputs)
    close(run(xt.apply(model), attention_mask=mask, **inputs), expected)
    mask[1, 2] = 0
    with pytest.raises(ValueError, match="does not support padding inside a sequence: choose sdpa"):
        model(attention_mask=mask, **inputs)


@places
def test_documents(place):
    """Positions that begin again, or cu_seq_lens: documents do not see each other."""
    model, inputs = new("llama", place), batch(place)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(place)
    expected = run(model, position_ids=positions.expand(B, -1), **inputs)
    xt.apply(model)
    close(run(model, position_ids=positions.expand(B, -1), **inputs), expected)
    one = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    expected = run(model, position_ids=positions, **one)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32, device=place)
    close(run(model, position_ids=positions, cu_seq_lens_q=lengths, **one), expected)


@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13],
        [0, 1, 0, 1, 9, 10, 0, 1, 2, 3, 4, 5],
        [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    ],
)
def test_documents_begin_where_they_do_in_transformers(positions):
    """Where positions do not count on; not where they begin with another number than 0."""
    model, inputs = new("llama"), batch()
    inputs["position_ids"] = torch.tensor([positions])
    expected = run(model, **inputs)
    close(run(xt.apply(model), **inputs), expected)


@places
def test_inference_mode(place):
    model, ids = new("qwen3", place).eval(), batch(place)["input_ids"]
    with torch.inference_mode():
        expected = model(ids).logits
        torch.testing.assert_close(xt.apply(model)(ids).logits, expected)


@places
def test_what_the_trainer_passes(place):
    """The number of items of all accumulated batches, targets that are shifted already, and a tuple as the result."""
    model, inputs = new("llama", place), batch(place)
    inputs |= {"num_items_in_batch": torch.tensor(33, device=place)}
    expected = run(model, **inputs)
    tuples = model(**inputs, return_dict=False)[0]
    close(run(xt.apply(model), **inputs), expected)
    torch.testing.assert_close(model(**inputs, return_dict=False)[0], tuples)
    labels = inputs.pop("labels")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    close(run(model, labels=labels, shift_labels=shifted, **inputs), expected)


@places
def test_autocast(place):
    """Float32 weights, products in bf16; also with attn_implementation="xtrain" alone."""
    inputs = batch(place)
    exact = run(new("qwen3", place), **inputs)[0]
    for change in (xt.apply, lambda model: model.set_attn_implementation("xtrain")):
        model = new("qwen3", place)
        xt.register_attention()
        change(model)
        with torch.autocast(place, torch.bfloat16):
            loss, *grads = run(model, **inputs)
        torch.testing.assert_close(loss, exact, rtol=5e-3, atol=0)
        assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("adapters", [False, True])
@places
def test_in_a_trainer(place, adapters, tmp_path):
    """Accumulated gradients, then an evaluation: the same losses as without xtrain. The Trainer uses Accelerate."""
    ids = torch.randint(3, 40, (8, T), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = dict(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=1e-2, logging_steps=1,
        eval_strategy="steps", eval_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=place == "cpu",
    )  # fmt: skip
    curves = []
    for change in (lambda model: model, xt.apply):
        model = new("llama")
        if adapters:
            model = adapted(model)
        model = change(model)
        arguments = hf.TrainingArguments(str(tmp_path), **options)
        trainer = hf.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:3])
        trainer.train()
        curves.append(
            [
                v
                for h in trainer.state.log_history
                for k, v in h.items()
                if k in ("loss", "eval_loss")
            ]
        )
    assert len(curves[0]) == 3
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_in_trl(packing, adapters, tmp_path):
    """SFTTrainer, with padded or packed rows: the same losses as without xtrain."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict(pad_token="w0", bos_token="w1", eos_token="w2")
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    lines = [" ".join(f"w{3 + i * j % 37}" for j in range(3 + i)) for i in range(1, 9)]
    curves = []
    for change in (lambda model: model, xt.apply):
        model = new("llama")
        if adapters:
            model = adapted(model)
        arguments = trl.SFTConfig(
            str(tmp_path), packing=packing, max_length=T, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            change(model),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"text": lines}),
            processing_class=tokenizer,
        )
        trainer.train()
        curves.append([h["loss"] for h in trainer.state.log_history if "loss" in h])
    assert len(curves[0]) == 3
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@places
def test_gradient_checkpointing(place):
    model, inputs = xt.apply(new("qwen3", place)), batch(place)
    expected = run(model, **inputs)
    model.gradient_checkpointing_enable()
    assert same(run(model, **inputs), expected)


@pytest.fixture
def one_rank(place):
    """A process group of this process alone."""
    backend = "nccl" if place == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@places
def test_data_parallel(place, one_rank):
    """DistributedDataParallel and FSDP2 give the gradients of one process."""
    from torch.distributed.fsdp import fully_shard

    inputs = batch(place)
    expected = run(xt.apply(new("llama", place)), **inputs)
    model = torch.nn.parallel.DistributedDataParallel(xt.apply(new("llama", place)))
    close(run(model, **inputs), expected)
    model = xt.apply(new("llama", place))
    mesh = dist.init_device_mesh(place, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    close([getattr(x, "full_tensor", lambda x=x: x)() for x in run(model, **inputs)], expected)


def adapted(model):
    """A model with adapters of peft, the same each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapters = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    return get_peft_model(model, adapters)


@places
def test_with_adapters_of_peft(place):
    found = []
    for change in (lambda model: model, xt.apply):
        model = change(adapted(new("llama", place)))
        found.append(run(model, **batch(place)))
    close(*found)
    assert model(**batch(place)).logits is None
    xt.revert(model)
    assert same(run(model, **batch(place)), found[0])


def test_norms_tuned_by_peft():
    """Its layers take the place of the norms that an op would read."""
    from peft import LNTuningConfig, get_peft_model

    names = ["post_attention_layernorm", "q_norm", "k_norm"]
    tuned = lambda model: get_peft_model(model, LNTuningConfig(target_modules=names))
    inputs = batch()
    expected = run(tuned(new("qwen3")), **inputs)
    close(run(tuned(xt.apply(new("qwen3"))), **inputs), expected)
    close(run(xt.apply(tuned(new("qwen3"))), **inputs), expected)


@pytest.mark.parametrize(
    "family, implementation",
    [("qwen2", "sdpa"), ("qwen3", "eager"), ("qwen3", "xtrain"), ("gemma3", "xtrain")],
)
@places
def test_generating(family, implementation, place):
    model = new(family, place).eval()
    model.set_attn_implementation("sdpa" if implementation == "xtrain" else implementation)
    prompt = batch(place)["input_ids"][:1, :5]
    run = lambda: model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
    expected = run()
    xt.apply(model, attention=implementation == "xtrain")
    assert run() == expected


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_copied_and_pickled(family):
    """A copy computes with its own weights, and a file can be read where xtrain is not imported yet."""
    model, inputs = xt.apply(new(family)), batch()
    expected = run(model, **inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert same(run(twin, **inputs), expected)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert same(run(loaded, **inputs), expected)
    assert loaded(**inputs).logits is None
    for module in (twin, loaded):
        xt.revert(module)
        assert module(**inputs).logits is not None
        assert not any("forward" in vars(part) for part in module.modules())


def test_the_signature_stays():
    """A Trainer looks there for the columns that the model reads."""
    model = new("llama")
    before = inspect.signature(model.forward)
    assert inspect.signature(xt.apply(model).forward) == before


@pytest.fixture
def accelerator():
    """One for bf16. Accelerate keeps its options for the whole process."""
    reset = functools.partial(AcceleratorState._reset_state, reset_partial_state=True)
    reset()
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reset()


def test_mixed_precision_of_accelerate(accelerator):
    """It wraps the forward, which generate reads the signature of, and unwraps it."""
    plain = new("llama")
    model = accelerator.prepare(xt.apply(new("llama")))
    output = model(**batch())
    assert output.logits is None and output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, plain(**batch()).loss, rtol=5e-3, atol=0)
    model.generate(batch()["input_ids"], max_new_tokens=2)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, rtol=1e-5, atol=0)
    prepared = accelerator.prepare(plain)
    with pytest.raises(
        UserError, match=r"^the forward of LlamaForCausalLM is not its own any more:"
    ):
        xt.apply(prepared)
    assert not any(isinstance(vars(m).get("forward"), functools.partial) for m in plain.modules())


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3"])
def test_hooks_of_every_module(family):
    """A module with a hook is called, also where an op would read its weight."""
    model, inputs = new(family), batch()
    expected = run(model, **inputs)
    called = []
    for name, module in xt.apply(model).named_modules():
        module.register_forward_hook(lambda module, given, y, name=name: called.append(name))
    close(run(model, **inputs), expected)
    assert {name for name, _ in model.named_modules()} - set(called) == {"model.layers"}


def test_offloaded_weights():
    """Accelerate loads a weight when its module is called."""
    ids = batch()["input_ids"]
    expected = new("qwen3")(ids).logits
    for changes in ((xt.apply, accelerate.cpu_offload), (accelerate.cpu_offload, xt.apply)):
        model = new("qwen3")
        for change in changes:
            change(model)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected)
            assert model(**batch()).loss > 0
            torch.testing.assert_close(xt.revert(model)(ids).logits, expected)
    accelerate.hooks.remove_hook_from_module(xt.apply(model), recurse=True)
    xt.revert(model)
    assert not any(isinstance(vars(m).get("forward"), functools.partial) for m in model.modules())


def test_divided_head():
    """FSDP2 may divide head and norms by themselves."""
    from torch.distributed.fsdp import fully_shard

    inputs = batch()
    expected = run(xt.apply(new("qwen3")), **inputs)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = xt.apply(new("qwen3"))
        mesh = dist.init_device_mesh("cpu", (1,))
        layer = model.model.layers[0]
        parts = model.lm_head, layer.post_attention_layernorm, layer.self_attn.q_norm, layer, model
        for part in parts:
            fully_shard(part, mesh=mesh)
        close(
            [x.full_tensor() if hasattr(x, "full_tensor") else x for x in run(model, **inputs)],
            expected,
        )
    finally:
        dist.destroy_process_group()


class Derived(hf.LlamaForCausalLM):
    """A user's model class that changes nothing."""


class Special(hf.LlamaForCausalLM):
    """One that changes its output."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = 2 * output.loss
        return output


def test_derived_models():
    plain = new("llama")
    for kind, factor in ((Derived, 1), (Special, 2)):
        model = kind(plain.config)
        model.load_state_dict(plain.state_dict())
        output = xt.apply(model)(**batch())
        torch.testing.assert_close(output.loss, factor * plain(**batch()).loss)
        assert (output.logits is None) == (kind is Derived)


def test_a_cap_of_the_logits():
    """Gemma 3's option: then transformers computes head and loss."""
    model, inputs = new("gemma3"), batch()
    model.config.final_logit_softcapping = 0.5
    expected = run(model, **inputs)
    close(run(xt.apply(model), **inputs), expected)
    assert model(**inputs).logits.abs().max() <= 0.5


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_another_activation(activation):
    """SwiGLU in a Gemma, and one for which there is no kernel."""
    options = {**MODELS["gemma3"][2], "hidden_activation": activation}
    model, inputs = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, **options)), batch()
    expected = run(model, **inputs)
    close(run(xt.apply(model), **inputs), expected)


def test_choosing():
    model = xt.apply(new("llama"), attention=False, loss=False)
    output = model(**batch())
    assert output.logits.shape == (B, T, 40)
    assert model.config._attn_implementation == "sdpa"
    tables = model.model.rotary_emb(torch.empty(0), torch.arange(T)[None])
    assert all(x.is_contiguous() for x in tables)  # else every call of rope copies them
    xt.register_attention()
    model.set_attn_implementation("xtrain")  # without apply
    torch.testing.assert_close(model(**batch()).loss, output.loss)


@pytest.mark.parametrize("place", ["cpu", GPU])
def test_compiled(place):
    """One graph for the whole model; its loss."""
    model, inputs = new("llama", place), batch(place)
    expected = run(model, **inputs)
    xt.apply(model)
    torch._dynamo.reset()
    backend = "inductor" if place == "cuda" else "aot_eager"
    close(run(torch.compile(model, fullgraph=True, backend=backend), **inputs), expected)


@pytest.mark.parametrize("implementation", [None, "static"])
def test_a_static_cache_is_refused(implementation):
    """Its keys end with empty ones, and a causal query would see these."""
    model, ids = xt.apply(new("llama")).eval(), batch()["input_ids"][:1, :5]
    with pytest.raises(ValueError, match=r"does not support a static KV cache: choose sdpa$"):
        if implementation:
            model.generate(ids, max_new_tokens=3, cache_implementation=implementation)
        else:
            cache = hf.StaticCache(config=model.config, max_cache_len=9)
            model(ids, past_key_values=cache, use_cache=True)


def test_a_mask_next_to_the_cache_of_a_window():
    """The cache of a sliding window holds the last keys; a mask has all of them."""
    model, ids = new("mistral").eval(), batch()["input_ids"][:1]
    found = []
    for change in (lambda model: model, xt.apply):
        change(model)
        cache = hf.DynamicCache(config=model.config)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            for part in (slice(0, 8), slice(8, 11), slice(11, 12)):
                options = dict(past_key_values=cache, attention_mask=mask[:, : part.stop])
                logits = model(ids[:, part], **options, use_cache=True).logits
        found.append(logits)
    torch.testing.assert_close(found[1], found[0])


def test_masks_that_are_more_than_causal():
    """Models of transformers ask for them; causal attention would be another model."""
    from transformers import masking_utils

    xt.register_attention()
    config = new("llama").config
    config._attn_implementation = "xtrain"
    config.attention_chunk_size = 4
    inputs = dict(config=config, inputs_embeds=torch.ones(2, 8, 64), attention_mask=None)
    inputs["past_key_values"] = None
    create = masking_utils.create_causal_mask
    assert create(**inputs) is None
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert create(**inputs, position_ids=positions) is None  # the attention looks at positions
    later = "does not support a mask in which tokens see later ones: choose sdpa$"
    for options in (
        dict(or_mask_function=lambda b, h, q, k: k == 0),
        dict(block_sequence_ids=torch.tensor([[-1, 0, 0, -1, -1, -1, -1, -1]] * 2)),
    ):
        with pytest.raises(ValueError, match=later):
            create(**inputs, **options)
    with pytest.raises(ValueError, match=r"does not support attention in chunks: choose sdpa$"):
        masking_utils.create_chunked_causal_mask(**inputs)
    config.is_causal = False
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 5:] = False
    starts = create(**inputs | {"attention_mask": mask})
    module = torch.nn.Module()
    module.is_causal = False
    q = torch.ones(2, 2, 8, 16)
    with pytest.raises(
        ValueError, match="does not support padding or a window without a causal ma"
    ):
        attend(module, q, q, q, starts)
    with pytest.raises(ValueError, match=r"does not support s_aux: choose sdpa$"):
        attend(module, q, q, q, None, s_aux=torch.ones(2))


def test_mistakes():
    gpt = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8, n_positions=8)
    )
    with pytest.raises(
        UserError, match=r"^apply does not know GPT2LMHeadModel: give a transformers model"
    ):
        xt.apply(gpt)
    with pytest.raises(UserError, match=r"^apply does not know str: give a transformers model"):
        xt.apply("meta-llama/Llama-3.2-1B")
    remote = new("llama")
    for module in remote.modules():
        module.__class__ = type(type(module).__name__, (type(module),), {})
    with pytest.raises(UserError, match=r"load the model without trust_remote_code$"):
        xt.apply(remote)
    model = xt.apply(new("llama"))
    with pytest.raises(
        UserError, match=r"has xtrain's kernels already: call revert\(model\) first"
    ):
        xt.apply(model)
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match=r"does not support dropout 0\.5: choose sdpa$"):
        model(**batch())
    mask = torch.ones(B, 1, T, T, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not support a mask with 4 axes: choose sdpa"):
        model.eval()(attention_mask=mask, **batch())
    mask = torch.ones(B, 5, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="does not support padding next to a KV cache"):
        model.generate(batch()["input_ids"][:, :5], attention_mask=mask, max_new_tokens=3)
