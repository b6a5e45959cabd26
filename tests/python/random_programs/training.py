"""Training steps of random networks: whole steps with losses, optimizers, schedules, accumulation and averages, or only the
network, as users write them."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kiln
from kiln.testing import difference

from .grammar import Grammar, function_of

# How a layer is made, and what it does to x (batch 4, time 5, 6 channels); both name it `$name`.
LAYERS = [
    ("nn.Linear(6, 6)", "x = self.$name(x)"),
    ("nn.Linear(6, 6, bias=False)", "x = self.$name(x).relu()"),
    ("nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))", "x = x + self.$name(x)"),
    ("nn.Sequential(nn.Linear(6, 4), nn.SiLU(), nn.Dropout(0.2), nn.Linear(4, 6))", "x = checkpoint(self.$name, x, use_reentrant=False)"),
    ("nn.ModuleList(nn.Linear(6, 6) for _ in range(3))", "for layer in self.$name:\n    x = x + layer(x).tanh()"),
    ("nn.LayerNorm(6)", "x = self.$name(x)"),
    ("nn.RMSNorm(6)", "x = self.$name(x)"),
    ("nn.BatchNorm1d(6)", "x = self.$name(x.transpose(1, 2)).transpose(1, 2)"),
    ("nn.InstanceNorm1d(6, affine=True)", "x = self.$name(x.transpose(1, 2)).transpose(1, 2)"),
    ("nn.GroupNorm(2, 6)", "x = self.$name(x.mT).mT"),
    ("nn.Conv1d(6, 6, 3, padding=1)", "x = self.$name(x.mT).mT"),
    ("nn.Conv1d(6, 6, 3, padding=1, groups=3)", "x = F.leaky_relu(self.$name(x.mT).mT)"),
    ("nn.Dropout(0.3)", "x = self.$name(x)"),
    ("nn.PReLU()", "x = self.$name(x)"),
    ("nn.MultiheadAttention(6, 2, batch_first=True)", "x = x + self.$name(x, x, x, need_weights=False)[0]"),
    ("nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)", "x = self.$name(x)"),
    ("nn.GRU(6, 6, batch_first=True)", "x = self.$name(x)[0]"),
    ("nn.LSTM(6, 6, batch_first=True)", "x, _ = self.$name(x)"),
    ("nn.Embedding(7, 6)", "x = x + self.$name(tokens)"),
    ("nn.Parameter(torch.ones(6))", "x = x * self.$name"),
    ("nn.Parameter(torch.zeros(5, 6))", "x = x + self.$name[: x.shape[1]]"),
    ("nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))", "x = self.$name(x)"),
    ("nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))", "x = self.$name(x)"),
    ("0", "self.$name += 1\nif self.$name % 2:\n    x = x * 1.1"),
    ("nn.Buffer(torch.zeros(6))", "if self.training:\n    self.$name.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)\nx = x - self.$name"),
    ("nn.Buffer(torch.ones(6))", "with torch.no_grad():\n    self.$name = self.$name * 0.5 + x.std((0, 1))\nx = x / (self.$name + 1)"),
    ("None", "first, second = x.chunk(2, -1)\nx = torch.cat([second.sigmoid() * first, first.tanh() + second], -1)"),
    ("None", "x = F.scaled_dot_product_attention(x, x, x, is_causal=True)"),
    ("None", "x = F.normalize(x, dim=-1) * x.norm(dim=-1, keepdim=True).clamp(max=2)"),
    ("None", "x = x - x.cumsum(1).mean(1, keepdim=True)"),
    ("None", "x = x.masked_fill(tokens[..., None] == 0, 0.5)"),
    ("None", "x = torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])], 1)"),
    ("None", "x = x + torch.randn_like(x) * 0.1"),
]  # fmt: skip

STEP = Grammar(
    loss=[
        *["F.mse_loss(out, y)", "F.l1_loss(out, y)", "F.huber_loss(out, y, reduction='sum') / 50", "(out - y).pow(2).mean().sqrt()"],
        *["F.cross_entropy(out.flatten(0, 1), tokens.flatten() % 6)", "F.cross_entropy(out.mT, tokens % 6, label_smoothing=0.1)"],
        *["F.mse_loss(out, y) + 0.01 * sum(p.pow(2).sum() for p in net.parameters())", "-F.logsigmoid(out).mean() + out.var() * 0.1"],
    ],
    backward=[
        *["loss.backward()"] * 4,
        "(loss / 2).backward()\nout = net(x * 0.5, tokens)\n(<loss> / 2).backward()",
        "grads = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad], allow_unused=True)\n"
        "for p, g in zip([p for p in net.parameters() if p.requires_grad], grads):\n    p.grad = g",
    ],
    clip=[
        *[""] * 3,
        "nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
        "nn.utils.clip_grad_value_(net.parameters(), 0.01)",
        "norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)\nhistory.append(norm.item())",
    ],
    after=[
        *[""] * 3,
        "schedule.step()",
        "history.append(loss.item())",
        "with torch.no_grad():\n    for a, p in zip(average, net.parameters()):\n        a.lerp_(p, 0.1)",
        "for a, p in zip(average, net.parameters()):\n    a.mul_(0.9).add_(p.detach(), alpha=0.1)",
        "history.append(out.detach().argmax(-1).eq(tokens).float().mean())",
        "if len(history) > 2:\n    history.clear()",
    ],
    zero=["optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "net.zero_grad()", "for p in net.parameters():\n    p.grad = None"],
    result=["loss", "loss.detach()", "loss, out", "out.detach().sum(), loss.detach()"],
    # Where a gradient is zero but for rounding (a bias before a normalization), a small eps makes a step of it.
    optimizer=[
        *["SGD(net.parameters(), lr=0.1)", "SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)"],
        *["Adam(net.parameters(), lr=0.01, eps=0.01)", "Adam(net.parameters(), lr=0.01, eps=0.01, foreach=False)"],
        *["AdamW(net.parameters(), lr=0.01, eps=0.01, amsgrad=True)", "RMSprop(net.parameters(), lr=0.01, eps=0.01, momentum=0.5)"],
        *["Adagrad(net.parameters(), lr=0.1, eps=0.01)", "Adadelta(net.parameters(), eps=0.01)"],
        *["NAdam(net.parameters(), lr=0.01, eps=0.01)", "RAdam(net.parameters(), lr=0.01, eps=0.01)", "Adamax(net.parameters(), eps=0.01)"],
        "AdamW([{'params': list(net.parameters())[:1], 'lr': 0.1}, {'params': list(net.parameters())[1:]}], lr=0.01, eps=0.01)",
    ],
    schedule=[
        *["StepLR(optimizer, 2, 0.5)", "CosineAnnealingLR(optimizer, 10)", "LambdaLR(optimizer, lambda epoch: 0.9**epoch)"],
        "OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)",
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    made, used = ["self.head = nn.Linear(6, 6)"], []
    for number, (make, use) in enumerate(r.choices(LAYERS, k=r.randrange(1, 6))):
        name = f"part{number}"
        if make != "None":
            made.append(f"self.{name} = {make}")
        used += use.replace("$name", name).splitlines()
    parts = {name: STEP.text(r, name) for name in ("zero", "loss", "backward", "clip", "after", "result")}
    step = [parts["zero"], "out = net(x, tokens)", f"loss = {parts['loss']}", parts["backward"], parts["clip"]]
    step = "\n".join([*step, "optimizer.step()", parts["after"], f"return {parts['result']}"])
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += ["        " + line for line in made]
    lines += [
        "    def forward(self, x, tokens):",
        *["        " + line for line in used],
        "        return self.head(x)",
        "",
    ]
    lines += ["def f(wrap):", "    torch.manual_seed(0)", "    net = wrap(Net().double())"]
    if r.random() < 0.2:
        lines.append("    list(net.parameters())[-1].requires_grad_(False)")
    if r.random() < 0.15:
        lines.append("    list(net.parameters())[0].register_hook(lambda g: g * 0.5)")
    lines.append(f"    optimizer = torch.optim.{STEP.text(r, 'optimizer')}")
    lines.append(f"    schedule = torch.optim.lr_scheduler.{STEP.text(r, 'schedule')}")
    lines += ["    average = [p.detach().clone() for p in net.parameters()]", "    history = []"]
    lines += ["    def step(x, y, tokens):", *["        " + line for line in step.splitlines() if line.strip()]]
    lines.append("    return net, optimizer, average, history, step")
    return "\n".join(lines) + "\n"


def trained(source, name, wrap_step, wrap_net):
    """What can be seen after each of a few steps."""
    scope = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint}
    f = function_of(source, name, scope)
    net, optimizer, average, history, step = f(wrap_net)
    step = wrap_step(step)
    g = torch.Generator().manual_seed(1)
    seen = []
    for number in range(5):
        x, y = (torch.randn(4, 5, 6, generator=g, dtype=torch.float64) for _ in range(2))
        tokens = torch.randint(0, 7, (4, 5), generator=g)
        result = step(x, y, tokens)
        seen.append([result, list(history), [t.detach().clone() for t in [*average, *net.state_dict().values()]]])
        if number == 2:
            net.eval()
            with torch.no_grad():
                seen.append(net(x, tokens))
            net.train()
    return seen, [p.grad for p in net.parameters()], torch.get_rng_state()


def run(seed):
    source, name = program(seed), f"<training {seed}>"

    def as_it_is(x):
        return x

    expected = trained(source, name, as_it_is, as_it_is)
    for part, ways in {"whole step": (kiln.compile, as_it_is), "network": (as_it_is, kiln.compile)}.items():
        kiln.reset()
        text = difference(expected, trained(source, name, *ways), rtol=1e-6, atol=1e-8, path=part)
        assert text is None, text
