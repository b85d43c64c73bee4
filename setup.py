"""Metadata, extras and entry points of hvdtrain. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# Horovod is in no extra: its release does not compile for these; `hvdtrain horovod install` builds it.
TORCH = ["torch>=2.4", "safetensors>=0.4"]
TENSORFLOW = ["keras>=3.5", "safetensors>=0.4"]  # which of tensorflow, tensorflow-cpu ... is the user's choice
MPI = ["mpi4py>=4.0"]
TENSORBOARD = ["tensorboard>=2.16"]
DATA = ["scikit-learn>=1.4"]
DEV = [
    "hypothesis>=6.100",
    "mypy>=1.10",
    "pytest-xdist>=3.5",
    "pytest>=8",
    "ruff>=0.5",
    "torchmetrics>=1.2",
    "types-PyYAML",
    "types-psutil",
]

setup(
    name="hvdtrain",
    version="0.1.0",
    description="Train one recipe in PyTorch or TensorFlow/Keras 3, on one process or many hosts, over Horovod and MPI",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["hvdtrain", "hvdtrain.*"]),
    package_data={"hvdtrain": ["py.typed", "launch/allreduce.rules"]},
    install_requires=["click>=8.1", "rich>=13", "numpy>=1.26", "PyYAML>=6", "psutil>=5.9"],
    extras_require={
        "torch": TORCH + MPI,
        "tensorflow": TENSORFLOW + MPI,
        "mpi": MPI,
        "tensorboard": TENSORBOARD,
        "data": DATA,
        "dev": DEV,
        "all": TORCH + TENSORFLOW + MPI + TENSORBOARD + DATA,
    },
    entry_points={"console_scripts": ["hvdtrain=hvdtrain.cli:main"]},
)
