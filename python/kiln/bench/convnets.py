"""Convolutional networks in plain PyTorch, as their users write them."""

import torch
from torch import nn
from torch.nn import functional as F


def conv_bn(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(cout)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut. (N, cin, H, W) -> (N, cout, H/stride, W/stride)."""

    expansion = 1

    def __init__(self, cin: int, width: int, stride: int, activation=nn.ReLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = activation(inplace=True)
        self.downsample = None
        if stride != 1 or cin != width:
            self.downsample = nn.Sequential(*conv_bn(cin, width, 1, stride))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut. (N, cin, H, W) -> (N, 4 * width, H/stride, W/stride)."""

    expansion = 4

    def __init__(self, cin: int, width: int, stride: int, activation=nn.ReLU) -> None:
        super().__init__()
        cout = width * self.expansion
        self.conv1 = nn.Conv2d(cin, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, cout, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(cout)
        self.relu = activation(inplace=True)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(*conv_bn(cin, cout, 1, stride))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Residual network (He et al., 2015). (N, channels, H, W) -> (N, classes) logits.

    small_stem: one 3x3 convolution instead of 7x7 with stride 2 and pooling, for small images.
    """

    def __init__(self, block, layers, width=64, channels=3, classes=1000, small_stem=False, activation=nn.ReLU) -> None:
        super().__init__()
        self.activation = activation
        self.cin = width
        if small_stem:
            self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = activation(inplace=True)
        stages = []
        for i, count in enumerate(layers):
            stages.append(self._stage(block, width << i, count, 1 if i == 0 else 2))
        self.layers = nn.ModuleList(stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.cin, classes)

    def _stage(self, block, width, count, stride):
        blocks = []
        for i in range(count):
            blocks.append(block(self.cin, width, stride if i == 0 else 1, self.activation))
            self.cin = width * block.expansion
        return nn.Sequential(*blocks)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.layers:
            x = stage(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def resnet50(**kwargs) -> ResNet:
    return ResNet(Bottleneck, [3, 4, 6, 3], **kwargs)


def resnet18(**kwargs) -> ResNet:
    return ResNet(BasicBlock, [2, 2, 2, 2], **kwargs)


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, optional squeeze-and-excitation, projection (MobileNetV2, EfficientNet)."""

    def __init__(self, cin, cout, stride, expand, kernel=3, activation=nn.ReLU6, squeeze=False) -> None:
        super().__init__()
        hidden = cin * expand
        layers = []
        if expand != 1:
            layers += [*conv_bn(cin, hidden, 1), activation(inplace=True)]
        layers += [*conv_bn(hidden, hidden, kernel, stride, groups=hidden), activation(inplace=True)]
        if squeeze:
            layers.append(SqueezeExcite(hidden, max(1, cin // 4)))
        layers += conv_bn(hidden, cout, 1)
        self.body = nn.Sequential(*layers)
        self.use_shortcut = stride == 1 and cin == cout

    def forward(self, x):
        return x + self.body(x) if self.use_shortcut else self.body(x)


class SqueezeExcite(nn.Module):
    """Channel attention: a gate in (0, 1) for each channel, from its mean."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(scale))))


class MobileNet(nn.Module):
    """MobileNetV2-like network (Sandler et al., 2018) of a few blocks. (N, 3, H, W) -> (N, classes)."""

    def __init__(self, width=16, classes=10, dropout=0.2) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *conv_bn(3, width, 3, 2),
            nn.ReLU6(inplace=True),
            InvertedResidual(width, width, 1, 1),
            InvertedResidual(width, 2 * width, 2, 6),
            InvertedResidual(2 * width, 2 * width, 1, 6),
            InvertedResidual(2 * width, 4 * width, 2, 6),
            *conv_bn(4 * width, 8 * width, 1),
            nn.ReLU6(inplace=True),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(8 * width, classes))

    def forward(self, x):
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)


class EfficientNet(nn.Module):
    """EfficientNet-like network (Tan and Le, 2019): SiLU, squeeze-and-excitation, 5x5 depthwise kernels."""

    def __init__(self, width=16, classes=10, dropout=0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, width, 3, 2), nn.SiLU(inplace=True))
        self.blocks = nn.ModuleList(
            [
                InvertedResidual(width, width, 1, 1, 3, nn.SiLU, True),
                InvertedResidual(width, 2 * width, 2, 4, 3, nn.SiLU, True),
                InvertedResidual(2 * width, 2 * width, 1, 4, 5, nn.SiLU, True),
                InvertedResidual(2 * width, 4 * width, 2, 4, 5, nn.SiLU, True),
            ]
        )
        self.head = nn.Sequential(*conv_bn(4 * width, 8 * width, 1), nn.SiLU(inplace=True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(self.dropout(self.pool(self.head(x)).flatten(1)))


class DoubleConv(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_bn(cin, cout, 3), nn.ReLU(inplace=True), *conv_bn(cout, cout, 3), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        return self.body(x)


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015). (N, channels, H, W) -> (N, classes, H, W)."""

    def __init__(self, channels=3, classes=4, width=16, depth=3) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down = nn.ModuleList([DoubleConv(width << i, width << (i + 1)) for i in range(depth)])
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for i in reversed(range(depth)):
            self.up.append(nn.ConvTranspose2d(width << (i + 1), width << i, 2, stride=2))
            self.merge.append(DoubleConv(width << (i + 1), width << i))
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = up(x)
            skip = skips.pop()
            dy, dx = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
            if dy or dx:
                x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = merge(torch.cat([skip, x], dim=1))
        return self.out(x)


class Generator(nn.Module):
    """DCGAN's generator (Radford et al., 2015). (N, latent, 1, 1) -> (N, channels, 32, 32) in (-1, 1)."""

    def __init__(self, latent=32, width=16, channels=3) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, width * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    """DCGAN's discriminator. (N, channels, 32, 32) -> (N,) logits."""

    def __init__(self, width=16, channels=3) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width * 4, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


class DCGAN(nn.Module):
    """Generator and discriminator with the generator's and the discriminator's loss summed. z, real -> scalar."""

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.generator = Generator(**kwargs)
        self.discriminator = Discriminator()

    def forward(self, z, real):
        fake = self.generator(z)
        logits_real = self.discriminator(real)
        logits_fake = self.discriminator(fake.detach())
        loss_d = F.binary_cross_entropy_with_logits(logits_real, torch.ones_like(logits_real))
        loss_d = loss_d + F.binary_cross_entropy_with_logits(logits_fake, torch.zeros_like(logits_fake))
        logits = self.discriminator(fake)
        loss_g = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        return loss_d + loss_g
