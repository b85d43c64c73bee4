# hvdtrain on CPUs: PyTorch, TensorFlow and Horovod built for both, over Debian's Open MPI.
#
#   docker build -t hvdtrain .
#   docker run --rm --shm-size=1g hvdtrain hvdtrain run -np 2 examples/torch_digits.py
#
# Loader workers exchange batches through /dev/shm, of which Docker gives 64 MB by default: hence --shm-size.

ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# PyTorch's own index has its CPU builds; the one on PyPI is for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make openmpi-bin libopenmpi-dev openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hvdtrain

# Packages first: they change less often than the code, and Docker keeps unchanged layers.
COPY setup.py pyproject.toml README.md ./
COPY .ci/constraints.txt .ci/
COPY hvdtrain hvdtrain
RUN pip install --no-cache-dir --constraint .ci/constraints.txt --extra-index-url "${TORCH_INDEX}" \
        ".[torch,tensorflow,tensorboard,data]" tensorflow-cpu

# Containers run as root, which Open MPI refuses unless told otherwise; nor may ranks read each other's memory (CMA).
ENV OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none

RUN hvdtrain horovod install && rm -rf /root/.cache

COPY examples examples
CMD ["hvdtrain", "--help"]
