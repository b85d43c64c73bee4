"""A small residual network (He et al., arXiv 1512.03385) in PyTorch on handwritten digits, as a list of layers.

They can be on several ranks: ``hvdtrain run -np 2 --pipeline 2 examples/torch_resnet.py``.
"""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
from hvdtrain.adapters.torch_pipeline import TorchPipeline


class Residual(torch.nn.Module):
    """Two convolutions beside a shortcut; normalised by groups, which do not depend on the other samples of a micro-batch."""

    def __init__(self, inputs: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = torch.nn.ModuleList([torch.nn.GroupNorm(4, channels), torch.nn.GroupNorm(4, channels)])
        same = inputs == channels and stride == 1
        self.shortcut = torch.nn.Identity() if same else torch.nn.Conv2d(inputs, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def recipe(*, channels: int = 16, lr: float = 0.05) -> hvdtrain.Recipe:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, valid_x, train_y, valid_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    torch.manual_seed(0)
    return hvdtrain.Recipe(
        adapter=TorchPipeline(
            torch.nn.Sequential(
                torch.nn.Conv2d(1, channels, 3, padding=1),
                Residual(channels, channels),
                Residual(channels, channels),
                Residual(channels, 2 * channels, stride=2),
                Residual(2 * channels, 2 * channels),
                torch.nn.AdaptiveAvgPool2d(1),
                torch.nn.Flatten(),
                torch.nn.Linear(2 * channels, 10),
            ),
            lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
            loss=F.cross_entropy,
            metrics={"accuracy": accuracy},
        ),
        train=(train_x, train_y),
        valid=(valid_x, valid_y),
        batch_size=64,
        epochs=8,
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
