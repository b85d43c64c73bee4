"""Handwritten digits with a small convolutional network in PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
from hvdtrain.adapters.torch import TorchAdapter


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def recipe(*, channels: int = 16, lr: float = 0.05) -> hvdtrain.Recipe:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, valid_x, train_y, valid_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(channels * 16, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    return hvdtrain.Recipe(
        adapter=TorchAdapter(
            model,
            torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
            loss=F.cross_entropy,
            metrics={"accuracy": accuracy},
        ),
        train=(train_x, train_y),
        valid=(valid_x, valid_y),
        batch_size=64,
        epochs=15,
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
