"""The two training tasks of the demo: real data, a model, and what is measured of it.

digits: scans of handwritten digits (scikit-learn's bundled images, 8x8, enlarged to 32x32), a ResNet, SGD with momentum.
text:   Python's own help topics (pydoc_data), character by character, a small GPT, AdamW.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from kiln.bench.convnets import BasicBlock, ResNet


@dataclasses.dataclass
class Task:
    """`batch(i)` is the i-th training batch; `loss(x, y)` trains; `accuracy(infer)` tests on data that was never trained on."""

    title: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    test: tuple[torch.Tensor, torch.Tensor]
    steps: int

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.module(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def accuracy(self, infer: Callable[[torch.Tensor], torch.Tensor]) -> float:
        x, y = self.test
        right = 0
        with torch.no_grad():
            for part, wanted in zip(x.split(60), y.split(60)):
                right += int((infer(part).argmax(-1) == wanted).sum())
        return right / y.numel()


def digits(seed: int) -> Task:
    """1437 images to train on and 360 to test with; (64, 1, 32, 32) a batch."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.5
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    torch.manual_seed(seed)
    # SiLU, not ReLU: at ReLU's kink one unit in the last place decides whether a gradient flows, and within thirty steps
    # eager's own losses, from weights changed by that much, are 3 % apart. Smooth, they stay within 3e-6.
    module = ResNet(BasicBlock, [2, 2, 2], width=32, channels=1, classes=10, small_stem=True, activation=nn.SiLU)
    shuffled = torch.cat(
        [train[torch.randperm(len(train), generator=torch.Generator().manual_seed(e))] for e in range(9)]
    )

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = shuffled[64 * i : 64 * (i + 1)]
        return images[chosen], labels[chosen]

    optimizer = torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    return Task("ResNet on digits", module, optimizer, batch, (images[test], labels[test]), 80)


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and around a shortcut. (N, T, width) -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(n, t, width)), self.dropout, self.training)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A decoder-only transformer over characters. (N, T) ids -> (N, T, vocabulary) logits."""

    def __init__(
        self, vocabulary: int, length: int, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(seed: int) -> Task:
    """The last tenth of the text is for testing; (16, 128) characters a batch."""
    from pydoc_data.topics import topics

    corpus = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(corpus))
    number = {c: i for i, c in enumerate(alphabet)}
    ids = torch.tensor([number[c] for c in corpus])
    length, rows = 128, 16
    cut = len(ids) * 9 // 10
    train, held = ids[:cut], ids[cut:]
    torch.manual_seed(seed)
    module = GPT(len(alphabet), length)

    def windows(source: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.stack([source[s : s + length] for s in starts.tolist()]),
            torch.stack([source[s + 1 : s + length + 1] for s in starts.tolist()]),
        )

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(train) - length - 1, (rows,), generator=torch.Generator().manual_seed(i))
        return windows(train, starts)

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    test = windows(held, torch.arange(0, 120 * length, length))
    return Task("GPT on Python's help topics", module, optimizer, batch, test, 200)


TASKS = {"digits": digits, "text": text}
