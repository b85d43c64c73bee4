"""A plain PyTorch loop for one process, as people write it. ``torch_loop.py`` is the same on many ranks."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train = DataLoader(TensorDataset(inputs[:1500], targets[:1500]), batch_size=64, shuffle=True)
    valid = DataLoader(TensorDataset(inputs[1500:], targets[1500:]), batch_size=256)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(5):
        model.train()
        for inputs, targets in train:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        hits, seen = 0, 0
        with torch.no_grad():
            for inputs, targets in valid:
                hits += (model(inputs).argmax(1) == targets).sum()
                seen += len(targets)
        print(f"epoch {epoch + 1}: accuracy {float(hits) / seen:.2%} of {int(seen)} samples")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
