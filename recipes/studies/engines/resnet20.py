"""The ResNet-20 for CIFAR (He et al. 2015, section 4.2), and its images."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WIDTHS, CLASSES = (16, 32, 64), 10


def norm_behind(before: int, after: int, stride: int) -> nn.Conv2d:
    """A 3x3 convolution whose bias is that of the norm behind it."""
    return nn.Conv2d(before, after, 3, stride, 1, bias=False)


class CifarBlock(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, channels padded with zeros."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = norm_behind(before, after, stride), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = norm_behind(after, after, 1), nn.BatchNorm2d(after)
        self.stride, self.added = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return functional.relu(y + x)


class CifarResNet(nn.Module):
    """Three stages of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = norm_behind(3, WIDTHS[0], 1), nn.BatchNorm2d(WIDTHS[0])
        before = WIDTHS[0]
        for i, width in enumerate(WIDTHS, 1):
            first = CifarBlock(before, width, 1 if i == 1 else 2)
            self.add_module(f"layer{i}", nn.Sequential(first, CifarBlock(width, width, 1), CifarBlock(width, width, 1)))
            before = width
        self.linear = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for i in range(1, len(WIDTHS) + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.linear(x.mean((2, 3)))


def read_resnet20(weights: Path, images: Path) -> tuple[nn.Module, Tensor]:
    """(The model of a file, normalized images [B, 3, 32, 32] of an archive with uint8 `X`)."""
    model = CifarResNet()
    model.load_state_dict(load_file(weights), strict=False)
    with np.load(images) as held:
        pixels = torch.from_numpy(held["X"]).permute(0, 3, 1, 2) / 255
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, DEVIATION))
    return model.eval(), (pixels - mean) / deviation
