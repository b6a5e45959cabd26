"""The models that are measured and tested: each builds a module, its inputs and its loss.

size "small" keeps a training step within milliseconds, for tests; "full" is what the published figures are measured on.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kiln.bench import convnets


@dataclasses.dataclass
class Workload:
    """A model with data. `batch(seed)` gives inputs; `infer(*inputs)` and `loss(*inputs)` run the module on them."""

    name: str
    module: nn.Module
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    infer: Callable[..., Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]


BUILDERS: dict[str, Callable[[bool], Workload]] = {}


def workload(build: Callable[[bool], Workload]) -> Callable[[bool], Workload]:
    BUILDERS[build.__name__] = build
    return build


def names() -> list[str]:
    return list(BUILDERS)


def make(name: str, size: str = "full", seed: int = 0) -> Workload:
    """The workload `name`, its parameters drawn after torch.manual_seed(seed). KeyError for an unknown name."""
    torch.manual_seed(seed)
    return BUILDERS[name](size == "small")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classifier(name: str, module: nn.Module, shape: tuple[int, ...], classes: int, optimizer: Any = adam) -> Workload:
    """A module from inputs of `shape` to (N, classes) logits, trained with cross entropy."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        g = generator(seed)
        return torch.randn(shape, generator=g), torch.randint(0, classes, (shape[0],), generator=g)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x), y)

    def infer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return module(x)

    return Workload(name, module, batch, loss, infer, optimizer)


class MLP(nn.Module):
    def __init__(self, features=64, hidden=128, classes=10, dropout=0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


@workload
def mlp(small: bool) -> Workload:
    return classifier("mlp", MLP(dropout=0.1 if small else 0.0), (32, 64), 10)


class Chain(nn.Module):
    """gelu, layer_norm and softmax one after the other: what fusion is for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return torch.softmax(self.norm(F.gelu(x) * 1.5 + 0.5), dim=-1)


@workload
def chain(small: bool) -> Workload:
    rows, width = (16, 64) if small else (2048, 1024)
    module = Chain(width)

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(rows, width, generator=generator(seed)),)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (module(x) * x).sum()

    return Workload("chain", module, batch, loss, module, sgd)


@workload
def resnet50(small: bool) -> Workload:
    if small:
        module = convnets.ResNet(convnets.Bottleneck, [1, 1], width=8, classes=10)
        return classifier("resnet50", module, (4, 3, 32, 32), 10)
    return classifier("resnet50", convnets.resnet50(), (8, 3, 128, 128), 1000)


@workload
def resnet18(small: bool) -> Workload:
    if small:
        module = convnets.ResNet(convnets.BasicBlock, [1, 1], width=8, classes=10, small_stem=True)
        return classifier("resnet18", module, (4, 3, 16, 16), 10, sgd)
    return classifier("resnet18", convnets.resnet18(), (8, 3, 128, 128), 1000, sgd)


@workload
def mobilenet(small: bool) -> Workload:
    width, size = (8, 32) if small else (32, 128)
    return classifier("mobilenet", convnets.MobileNet(width), (4 if small else 8, 3, size, size), 10)


@workload
def efficientnet(small: bool) -> Workload:
    width, size = (8, 32) if small else (32, 128)
    return classifier("efficientnet", convnets.EfficientNet(width), (4 if small else 8, 3, size, size), 10)


@workload
def unet(small: bool) -> Workload:
    width, size, depth = (8, 24, 2) if small else (32, 96, 3)
    module = convnets.UNet(width=width, depth=depth)

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        g = generator(seed)
        return torch.randn(2, 3, size, size, generator=g), torch.randint(0, 4, (2, size, size), generator=g)

    return Workload("unet", module, batch, lambda x, y: F.cross_entropy(module(x), y), lambda x, y: module(x), adam)


@workload
def dcgan(small: bool) -> Workload:
    width = 8 if small else 64
    module = convnets.DCGAN(latent=32, width=width)
    n = 4 if small else 32

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        g = generator(seed)
        return torch.randn(n, 32, 1, 1, generator=g), torch.randn(n, 3, 32, 32, generator=g)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999))

    return Workload("dcgan", module, batch, module, lambda z, real: module.generator(z), optimizer)


class LSTM(nn.Module):
    """A long short-term memory cell written out by hand (Hochreiter and Schmidhuber, 1997), unrolled over time.

    (N, T, features) -> (N, T, hidden).
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(features, 4 * hidden)
        self.state = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.hidden)
        c = torch.zeros_like(h)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.input(x[:, t]) + self.state(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


@workload
def lstm(small: bool) -> Workload:
    n, steps, features, hidden = (4, 5, 8, 16) if small else (32, 32, 64, 128)
    module = LSTM(features, hidden)

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        g = generator(seed)
        return torch.randn(n, steps, features, generator=g), torch.randn(n, steps, hidden, generator=g)

    return Workload("lstm", module, batch, lambda x, y: F.mse_loss(module(x), y), lambda x, y: module(x), adamw)


def language_model(name: str, module: nn.Module, vocabulary: int, shape: tuple[int, int], optimizer: Any) -> Workload:
    """A transformers model that takes ids and labels. infer gives logits."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, vocabulary, shape, generator=generator(seed)),)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return module(input_ids=ids, labels=ids).loss

    def infer(ids: torch.Tensor) -> torch.Tensor:
        return module(input_ids=ids, **({"use_cache": False} if name != "bert" else {})).logits

    return Workload(name, module, batch, loss, infer, optimizer)


@workload
def bert(small: bool) -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    if small:
        config = BertConfig(
            vocab_size=101,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
        )
        return language_model("bert", BertForMaskedLM(config), 101, (2, 12), adamw)
    config = BertConfig(hidden_size=256, num_hidden_layers=12, num_attention_heads=4, intermediate_size=1024)
    return language_model("bert", BertForMaskedLM(config), config.vocab_size, (4, 128), adam)


@workload
def gpt2(small: bool) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    if small:
        config = GPT2Config(
            vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        return language_model("gpt2", GPT2LMHeadModel(config), 101, (2, 12), adamw)
    config = GPT2Config(n_positions=128, n_embd=256, n_layer=6, n_head=4)
    return language_model("gpt2", GPT2LMHeadModel(config), config.vocab_size, (4, 128), adam)


@workload
def llama(small: bool) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    if small:
        config = LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        return language_model("llama", LlamaForCausalLM(config), 101, (2, 12), adamw)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4, max_position_embeddings=128
    )
    return language_model("llama", LlamaForCausalLM(config), config.vocab_size, (4, 128), adam)


@workload
def vit(small: bool) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    if small:
        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=10,
            hidden_dropout_prob=0.1,
        )
        n = 2
    else:
        config = ViTConfig(
            hidden_size=256,
            num_hidden_layers=12,
            num_attention_heads=4,
            intermediate_size=1024,
            image_size=224,
            patch_size=16,
            num_labels=1000,
        )
        n = 4
    module = ViTForImageClassification(config)

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        g = generator(seed)
        size = config.image_size
        return torch.randn(n, 3, size, size, generator=g), torch.randint(0, config.num_labels, (n,), generator=g)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(pixel_values=x).logits, y)

    return Workload("vit", module, batch, loss, lambda x, y: module(pixel_values=x).logits, adam)


def training_step(work: Workload, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """One whole step, to be compiled as one function: zero_grad, forward, backward, update. Returns the detached loss."""

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = work.loss(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
