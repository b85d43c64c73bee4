"""Batch normalisation on several ranks: over the global batch, or with statistics that are made equal afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvdtrain.comm import Communicator


def synchronize(model: torch.nn.Module, hvd: Any, prefix: str = "batch norm/") -> None:
    """Make every batch normalisation of ``model`` one over the samples of all ranks, in place.

    The modules stay what they are (names, state, ``isinstance``); only how they normalise in training changes. PyTorch's
    own SyncBatchNorm works inside DistributedDataParallel alone, and Horovod's on GPUs alone.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module.forward, _Forward):
            object.__setattr__(module, "forward", _Forward(module, prefix + name, partial(hvd.allreduce, op=hvd.Sum)))


def set_part(model: torch.nn.Module, part: float, *, present: bool = True) -> None:
    """Say what this rank's gradients will be multiplied with after they came back: 1 where the loss is weighted already.

    Args:
        present: whether samples pass through the model, or something that takes part and counts for nothing.
    """
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), _Forward):
            forward.part, forward.present = part, present


def average_statistics(model: torch.nn.Module, comm: Communicator, samples: float) -> None:
    """Collective. Give all ranks the mean of the moving statistics that each gathers from its own samples alone.

    ``samples`` is how many this rank gathered them from since the last time; its statistics count accordingly.
    """
    if not (tensors := own_statistics(model)):
        return
    # In float64 the mean of equal float32 is exactly that value: what does not differ is not changed.
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double().cpu().numpy()
    *_, total = sums = comm.allreduce(np.append(flat * samples, samples), name="moving statistics")
    if total > 0:
        parts = torch.split(torch.from_numpy(sums[:-1] / total), [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    passes = [module.num_batches_tracked for module in _own(model) if module.num_batches_tracked is not None]
    most = comm.allreduce([float(tensor) for tensor in passes], name="passes", op="max")  # ranks may have had fewer
    for tensor, number in zip(passes, most.tolist(), strict=True):
        tensor.fill_(int(number))


def own_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """The moving statistics that a rank gathers from its own samples alone."""
    tensors = [tensor for module in _own(model) for tensor in (module.running_mean, module.running_var)]
    return [tensor for tensor in tensors if tensor is not None]


def _own(model: torch.nn.Module) -> list[_NormBase]:
    kinds = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    return [module for module in kinds if "forward" not in vars(module)]


class _Forward:
    """The forward pass of one batch normalisation module, over all ranks."""

    def __init__(self, module: _BatchNorm, name: str, reduce: Callable[..., torch.Tensor]) -> None:
        self.module, self.name, self.reduce = module, name, reduce
        self.inner = module.forward
        #: see ``set_part``
        self.part, self.present = 1.0, True

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        module = self.module
        result: torch.Tensor
        if not module.training:  # evaluation is no business of the other ranks
            result = self.inner(inputs)
            return result
        module._check_input_dim(inputs)  # type: ignore[no-untyped-call]
        output, mean, variance, count = _GlobalNorm.apply(inputs, module.weight, module.bias, module.eps, self)  # type: ignore[no-untyped-call]
        if module.track_running_stats and count > 0:
            assert module.running_mean is not None
            assert module.running_var is not None
            assert module.num_batches_tracked is not None
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
                share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
                unbiased = variance * (count / max(count - 1.0, 1.0))
                module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
                module.running_var.lerp_(unbiased.to(module.running_var.dtype), share)
        result = output
        return result

    def sum(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Collective."""
        return self.reduce(tensor, name=f"{self.name}/{what}")


class _GlobalNorm(torch.autograd.Function):
    """Batch normalisation whose mean, variance and their gradients are over all ranks (Ioffe and Szegedy, arXiv 1502.03167).

    Each rank brings its count, sum and sum of squares about its own mean; they meet in float64 (Chan et al., 1979).
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: Any, bias: Any, eps: float, norm: _Forward) -> Any:
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        values = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
        counting = float(norm.present)
        count = counting * values.numel() / max(values.shape[1], 1)
        mean = values.mean(axes).double()
        square = (values - mean.to(values.dtype).view(shape)).square().sum(axes).double()
        facts = torch.cat([mean * count, counting * square + count * mean.square(), mean.new_tensor([count])])
        total = norm.sum(facts, "statistics")
        channels, everybody = values.shape[1], float(total[-1])
        mean = total[:channels] / max(everybody, 1.0)
        variance = (total[channels:-1] / max(everybody, 1.0) - mean.square()).clamp_(min=0.0)
        inverse = (variance + eps).rsqrt().to(values.dtype)
        normal = (values - mean.to(values.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.norm, ctx.count, ctx.axes, ctx.shape, ctx.has_bias = norm, everybody, axes, shape, bias is not None
        ctx.present = norm.present
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        return output.to(inputs.dtype), mean, variance, everybody

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normal, inverse, weight = ctx.saved_tensors
        outer = gradients[0].to(normal.dtype)
        of_bias, of_weight = outer.sum(ctx.axes), (outer * normal).sum(ctx.axes)
        inner = outer if weight is None else outer * weight.view(ctx.shape)
        sums = torch.cat([inner.sum(ctx.axes), (inner * normal).sum(ctx.axes)]).double()
        # The gradients of other ranks count for another part than those of this one, which is multiplied with its own later.
        part = ctx.norm.part
        mine = sums * part if part else torch.zeros_like(sums)  # of nothing it may be anything, NaN too
        means = ctx.norm.sum(mine, "gradients") / (max(ctx.count, 1.0) * (part or 1.0))
        mean, mean_normal = means.to(normal.dtype).chunk(2)
        of_inputs = (inner - mean.view(ctx.shape) - normal * mean_normal.view(ctx.shape)) * inverse.view(ctx.shape)
        of_inputs = of_inputs if ctx.present else torch.zeros_like(of_inputs)
        return (
            of_inputs.to(gradients[0].dtype),
            None if weight is None else of_weight,
            of_bias if ctx.has_bias else None,
            None,
            None,
        )
