"""Whole training steps under the recorder: every ATen call of the usual models has a rule, and it agrees with eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from shape_rules import Recorder

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def check(step):
    recorder = Recorder()
    with recorder:
        step()
    assert recorder.failures == []
    # item() in optimizers' bookkeeping gives no tensor.
    assert set(recorder.missing) <= {"aten::_local_scalar_dense"}
    assert sum(recorder.checked.values()) > 20


def language_model(make):
    ids = torch.randint(0, 50, (2, 8))
    return make(), {"input_ids": ids, "labels": ids}


MODELS = {
    "bert": lambda: language_model(lambda: BertForMaskedLM(BertConfig(**SMALL))),
    "gpt2": lambda: language_model(
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    ),
    "llama": lambda: language_model(lambda: LlamaForCausalLM(LlamaConfig(**SMALL))),
    "vit": lambda: (
        ViTForImageClassification(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=16,
                patch_size=8,
                num_labels=2,
            )
        ),
        {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_train_and_infer(name):
    model, inputs = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(**inputs)

    check(step)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        nn.Conv2d(16, 8, 1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(8, 8, 2, 2),
        nn.LeakyReLU(0.2),
        nn.GroupNorm(2, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 10),
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, foreach=False),
        lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda p: torch.optim.RMSprop(p, foreach=True),
    ],
)
def test_convolutional_nets_train_and_infer(optimizer, channels_last):
    model, x = convolutional(), torch.rand(2, 3, 32, 32)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = optimizer(model.parameters())

    def step():
        F.cross_entropy(model(x), torch.tensor([1, 2])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        model(x)

    check(step)


def test_recurrent_cells():
    x, w, u = torch.rand(2, 5, 8), nn.Linear(8, 32), nn.Linear(8, 32)

    def step():
        h = c = torch.zeros(2, 8)
        for t in range(5):
            i, f, g, o = (w(x[:, t]) + u(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        h.sum().backward()

    check(step)


def test_mixed_precision():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.rand(3, 8)), torch.tensor([0, 1, 2]))
        loss.backward()

    check(step)
