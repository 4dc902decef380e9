"""Small image classifiers, stored or read from the real data, and images to calibrate and judge by."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from places import FIXTURES
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

CHANCE = 4  # standard deviations that `lost` may be by chance: once in 30,000 comparisons
CALIBRATORS = ("minmax", "moving-average", "percentile", "mse", "kl")
CLASSIFIERS = FIXTURES / "classifiers"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """Images for training and calibration, and images with labels to judge a model by."""

    seen: Tensor
    seen_labels: Tensor
    unseen: Tensor
    labels: Tensor


@cache
def patterns(seen: int = 4000, unseen: int = 2000) -> Images:
    """Ten random smooth 8x8 patterns, moved by up to two pixels, at random contrast in noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(10, 1, 4, 4, generator=generator)
    shapes = functional.interpolate(coarse, (8, 8), mode="bilinear")[:, 0]
    count = seen + unseen
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.55 * torch.randn(count, 1, 12, 12, generator=generator)
    corners = torch.randint(5, (count, 2), generator=generator)
    contrast = 0.7 + 0.6 * torch.rand(count, generator=generator)
    for image, label, (row, column), size in zip(images, labels, corners.tolist(), contrast, strict=True):
        image[0, row : row + 8, column : column + 8] += size * shapes[label]
    return Images(images[:seen], labels[:seen], images[seen:], labels[seen:])


@cache
def digits() -> Images:
    """scikit-learn's 1797 handwritten digits, 8x8."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits are in scikit-learn")
    found = datasets.load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    return Images(x[:1200], y[:1200], x[1200:], y[1200:])


def conv_bn(before: int, after: int, stride: int = 1, groups: int = 1, size: int = 3) -> list[nn.Module]:
    """A convolution without bias, a batch norm, ReLU."""
    convolution = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU()]


TASKS = {"patterns": patterns, "digits": digits}


class Classifier(nn.Module):
    """Convolutions, an average over the image, a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        middle = (
            conv_bn(16, 32, 2)
            if kind == "plain"
            else [*conv_bn(16, 16, 2, groups=16), *conv_bn(16, 32, size=1), *conv_bn(32, 32, groups=32)]
        )
        self.features = nn.Sequential(*conv_bn(1, 16), *middle, *conv_bn(32, 32, size=1))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).amax((2, 3)))


def trained(kind: str, task: str) -> tuple[nn.Module, Images]:
    """A stored classifier: `plain` of `patterns` or `separable` of `digits` (fixtures/make_classifiers.py)."""
    model = Classifier(kind)
    model.load_state_dict(load_file(CLASSIFIERS / f"{kind}-{task}.safetensors"))
    return model.eval(), TASKS[task]()


def batches(images: Tensor, count: int = 200) -> list[dict[str, Tensor]]:
    """The first images as micro-batches of 50."""
    return [{"x": part} for part in images[:count].split(50)]


@torch.no_grad()
def right(model: nn.Module, data: Images) -> Tensor:
    """Which of the unseen images the model labels right."""
    batches = zip(data.unseen.split(500), data.labels.split(500), strict=True)
    return torch.cat([model(x).argmax(1) == y for x, y in batches])


def points(found: Tensor) -> float:
    """Percent of images that are labelled right."""
    return 100 * float(found.double().mean())


def lost(before: Tensor, after: Tensor) -> float:
    """How many more images went wrong than came right, in standard deviations of what chance does to them.

    Where rounding costs nothing, an image whose label changes is as likely won as lost, so that the difference of n
    such images has the standard deviation sqrt(n) (McNemar 1947): on every machine, whatever it rounds another way.
    """
    gone, come = int((before & ~after).sum()), int((after & ~before).sum())
    return (gone - come) / max(1, gone + come) ** 0.5


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second pixel, channels padded with zeros."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.added = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return functional.relu(y + x)


class ResNet20(nn.Module):
    """The ResNet-20 for CIFAR (He et al. 2015, section 4.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, 1)
        self.layer2 = self._stage(16, 32, 2)
        self.layer3 = self._stage(32, 64, 2)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def _stage(before: int, after: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(before, after, stride), *(BasicBlock(after, after, 1) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def resnet20(folder: Path) -> tuple[nn.Module, Images]:
    """The trained ResNet-20 of the real data with its thousand images: 200 seen, 800 to judge by."""
    model = ResNet20()
    model.load_state_dict(load_file(folder / "models/cifar-resnet20/resnet20.safetensors"), strict=False)
    with np.load(folder / "vision/cifar10_test1000_jpeg.npz") as held:
        pixels, labels = torch.from_numpy(held["X"]), torch.from_numpy(held["y"]).long()
    x = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    return model.eval(), Images(x[:200], labels[:200], x[200:], labels[200:])


class Net(nn.Module):
    """A stem, a depthwise and a grouped convolution, a shortcut that reads what another one reads, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8)
        self.shortcut = nn.Conv2d(8, 12, 1, stride=2)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        y = self.grouped(functional.relu(self.depthwise(x))) + self.shortcut(x)
        return self.head(functional.relu(y).mean((2, 3)))


def net() -> Net:
    """A random `Net`, always the same."""
    torch.manual_seed(0)
    return Net().eval()


def calibration() -> list[dict[str, Tensor]]:
    """Micro-batches for `net`, an odd number."""
    return [{"x": x} for x in torch.randn(12, 3, 10, 10, generator=torch.Generator().manual_seed(2)).split(4)]
