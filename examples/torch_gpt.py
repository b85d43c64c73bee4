"""A small GPT in PyTorch that learns the English of Python's own reference manual, letter by letter.

Its layers can be on several ranks: ``hvdtrain run -np 2 --pipeline 2 examples/torch_gpt.py``. The first and the last layer have the
same weights. Each layer is made only on the rank that has it.
"""

import pydoc_data.topics

import numpy as np
import torch
import torch.nn.functional as F

import hvdtrain
from hvdtrain.adapters.torch_layers import Layer
from hvdtrain.adapters.torch_pipeline import TorchPipeline

WORDS = 128  # ASCII


def sequences(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the text, and the same one letter on: [samples, length] each."""
    text = " ".join(" ".join(page.split()) for _, page in sorted(pydoc_data.topics.topics.items()))
    letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    samples = (len(letters) - 1) // length
    return letters[: samples * length].reshape(-1, length), letters[1 : samples * length + 1].reshape(-1, length)


class Embedding(torch.nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.words = torch.nn.Parameter(0.02 * torch.randn(WORDS, width))
        self.places = torch.nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.words[letters] + self.places[: letters.shape[1]]


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def recipe(*, width: int = 96, blocks: int = 4, heads: int = 4, length: int = 64, lr: float = 3e-3) -> hvdtrain.Recipe:
    inputs, targets = sequences(length)
    held_out = len(inputs) // 20
    torch.manual_seed(0)
    embedding = Layer(lambda: Embedding(width, length))
    return hvdtrain.Recipe(
        adapter=TorchPipeline(
            [
                embedding,
                *[lambda: Block(width, heads) for _ in range(blocks)],
                lambda: torch.nn.LayerNorm(width),
                embedding.tied(lambda module, x: x @ module.words.T),
            ],
            lambda model: torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95)),
            loss=loss,
        ),
        train=(inputs[held_out:], targets[held_out:]),
        valid=(inputs[:held_out], targets[:held_out]),
        batch_size=32,
        epochs=3,
        lr=hvdtrain.lr.warmup(hvdtrain.lr.constant(lr), 20),
    )


if __name__ == "__main__":
    hvdtrain.main(recipe)
