"""Architectures of `transformers` in small configurations, unmodified: one graph for a prediction and one for a training
step, both as in eager; and generation with a static cache."""

import copy

import pytest
import torch
import transformers as T

import kiln
from kiln.testing import CompileCounter, assert_same

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
TWO_SIDED = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
PICTURE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()


def text(**more):
    return {"input_ids": IDS, "attention_mask": MASK, **more}


MODELS = {
    "mamba": (
        lambda: T.MambaForCausalLM(
            T.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4)
        ),
        text(labels=IDS),
    ),
    "mistral": (lambda: T.MistralForCausalLM(T.MistralConfig(**DECODER, sliding_window=4)), text(labels=IDS)),
    "gemma3": (
        lambda: T.Gemma3ForCausalLM(
            T.Gemma3TextConfig(
                **DECODER,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=8,
            )
        ),
        text(labels=IDS),
    ),
    "qwen3": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**DECODER)), text(labels=IDS)),
    "modernbert": (
        lambda: T.ModernBertForMaskedLM(T.ModernBertConfig(**SIZES, local_attention=4, global_attn_every_n_layers=2)),
        text(labels=IDS),
    ),
    "deberta": (lambda: T.DebertaV2Model(T.DebertaV2Config(**SIZES)), text()),
    "t5": (
        lambda: T.T5ForConditionalGeneration(
            T.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        text(labels=IDS),
    ),
    "bart": (lambda: T.BartForConditionalGeneration(T.BartConfig(**TWO_SIDED)), text(labels=IDS)),
    "moonshine": (
        lambda: T.MoonshineModel(T.MoonshineConfig(**SIZES, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2)),
        {"input_values": torch.linspace(-9, 9, 4000).sin().reshape(2, 2000), "decoder_input_ids": IDS},
    ),
    "siglip": (
        lambda: T.SiglipVisionModel(T.SiglipVisionConfig(**VISION)),
        {"pixel_values": PICTURE},
    ),
    "swin": (
        lambda: T.SwinForImageClassification(
            T.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4)
        ),
        {"pixel_values": PICTURE, "labels": torch.tensor([0, 1])},
    ),
    "segformer": (
        lambda: T.SegformerModel(
            T.SegformerConfig(
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[4, 1],
                hidden_sizes=[16, 32],
                patch_sizes=[7, 3],
                strides=[4, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[2, 2],
            )
        ),
        {"pixel_values": PICTURE},
    ),
}


def loss_of(outputs):
    if "loss" in outputs:
        return outputs.loss
    first = outputs[0].float()
    return (first * torch.linspace(-1, 1, first.numel()).reshape(first.shape)).mean()


def make(name):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    return build(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_prediction(name):
    model, inputs = make(name)
    model.eval()
    compiled = kiln.compile(model, fullgraph=True)
    with torch.no_grad():
        model(**inputs)  # what it sets up at its first call
        expected = model(**inputs)
        for _ in range(2):
            found = compiled(**inputs)
            assert type(found) is type(expected) and list(found) == list(expected)
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert_same(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name):
    """With dropout: the masks are eager's."""
    start, inputs = make(name)

    def run(wrap):
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs):
            loss = loss_of(model(**inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(3)
        losses = [step(inputs) for _ in range(3)]
        return losses, model.state_dict()

    expected = run(lambda f: f)
    actual = run(lambda f: kiln.compile(f, fullgraph=True))
    assert_same(actual, expected, rtol=2e-3, atol=2e-5)


def test_generation_with_a_static_cache():
    """The cache is a new object in each generation; one entry serves the prompts and one the steps."""
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**DECODER)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(IDS, **options)
    counter = CompileCounter()
    forward = model.forward
    model.forward = kiln.compile(forward, backend=counter)
    assert torch.equal(model.generate(IDS, **options), expected)
    once = counter.frame_count
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **options), expected)
    assert counter.frame_count == once
    model.forward = kiln.compile(forward)
    assert torch.equal(model.generate(IDS, **options), expected)
