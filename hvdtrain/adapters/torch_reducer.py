"""Sums gradients over ranks with Horovod, in flat buckets, each as soon as backward has filled it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from hvdtrain.adapters import torch_fused
from hvdtrain.adapters.torch_exchange import Summed, own_gradients, sparse_weights
from hvdtrain.adapters.torch_state import is_dense
from hvdtrain.errors import UsageError
from hvdtrain.exchange import buckets
from hvdtrain.horovod import require, start
from hvdtrain.progress import HERE
from hvdtrain.update import Update

_BUCKET_BYTES = 4 << 20


def start_horovod(update: Update, sets: Sequence[Sequence[int]] = ()) -> tuple[Any, Any]:
    """Horovod for PyTorch, started, and the process set that this rank reduces in: one of ``sets``, or as ``update`` says.

    Raises:
        HvdtrainError: it is not installed for PyTorch, or these ranks cannot reduce so.
    """
    require("torch")
    import horovod.torch as hvd

    ours = start.init(hvd, sets or update.process_sets)
    update.check_size(hvd.size())
    return hvd, ours


class Carrier(Protocol):
    """Sums a bucket over ranks while this thread goes on. Buckets are given in the same order on every rank."""

    def begin(self, bucket: Bucket) -> Any:
        """Begin to sum ``bucket.flat`` in place; what is returned is for the others."""

    def is_done(self, handle: Any) -> bool: ...

    def wait(self, handle: Any) -> None:
        """Collective."""

    def close(self) -> None: ...


class Bucket:
    """Parameters whose gradients lie in one flat tensor, in the order in which backward is expected to give them.

    A single one needs no copy: its gradient is summed where it is, if it lies in memory as the parameter does.
    """

    def __init__(self, name: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.name, self.names, self.parameters = name, list(parameters), list(parameters.values())
        #: those whose gradients have not come in this step
        self.missing = set(range(len(self.parameters)))
        self.handle: Any = None
        self.flat = torch.empty(0)
        #: of ``flat``, in the parameters' shapes and memory orders
        self.views: list[torch.Tensor] = []

    def take(self, place: int) -> None:
        """Put the gradient of the parameter at ``place``, or zeros, where it is summed."""
        self.missing.discard(place)
        parameter = self.parameters[place]
        gradient = parameter.grad
        if gradient is not None and len(self.parameters) == 1 and _lies_alike(gradient, parameter):
            self.flat, self.views = gradient.as_strided((gradient.numel(),), (1,)), [gradient]
            return
        if not self.views or (len(self.parameters) == 1 and gradient is not None):
            self._make()
        view = self.views[place]
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(gradient)

    def _make(self) -> None:
        first = self.parameters[0]
        self.flat = torch.empty(sum(each.numel() for each in self.parameters), dtype=first.dtype, device=first.device)
        self.views, offset = [], 0
        for each in self.parameters:
            strides = each.stride() if is_dense(each) else torch.empty(each.size(), device="meta").stride()
            self.views.append(self.flat.as_strided(each.size(), strides, offset))
            offset += each.numel()


class GradientReducer:
    """Watches a model's backward passes; ``begin`` before a step's first one, ``finish`` after its last."""

    def __init__(
        self,
        model: torch.nn.Module,
        update: Update,
        prefix: str = "gradient/",
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        carrier: Carrier | None = None,
        sets: Sequence[Sequence[int]] = (),
    ) -> None:
        self.hvd, self._set = start_horovod(update, sets)
        self._op = self.hvd.Adasum if update.op == "adasum" else self.hvd.Sum
        self._prefix = prefix
        self._named = list(model.named_parameters())
        _refuse_dtypes(self._named)
        self._sparse = sparse_weights(model)
        if self._sparse and update.op == "adasum":
            raise UsageError("op='adasum' cannot add up sparse gradients", "use Embedding(sparse=False), or op='average'")
        self._bucket_bytes = 0 if update.op == "adasum" else bucket_bytes  # which weighs each tensor by itself
        self._carrier: Carrier = _Horovod(self.hvd, self._set, self._op) if carrier is None else carrier
        self._trainable: tuple[bool, ...] = ()
        self._passes, self._counts = 0, [0] * len(self._named)
        self._buckets: list[Bucket] = []
        self._begun = 0
        self._hooks: list[Any] = []
        self.not_finite: list[str] = []

    def begin(self, passes: int) -> None:
        """The next ``passes`` backward passes make one sum; it begins within the last of them.

        Follows layers that were frozen or unfrozen since the last step (on all ranks alike).
        """
        trainable = tuple(parameter.requires_grad for _, parameter in self._named)
        if trainable != self._trainable:
            self._wire(trainable)
        self._passes, self._counts, self._begun = passes, [0] * len(self._named), 0
        for bucket in self._buckets:
            bucket.missing, bucket.handle = set(range(len(bucket.parameters))), None

    def close(self) -> None:
        """Let go of the model."""
        self._unhook()
        self._carrier.close()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._passes = sys.maxsize  # the graph of a step that was interrupted may still have them

    def finish(self, numbers: Sequence[float], largest: Mapping[str, torch.Tensor] | None = None) -> list[float]:
        """Collective. Wait for the sums of the gradients, and return those of ``numbers``.

        ``largest`` has the largest absolute value of this rank's own gradient of a parameter; ``not_finite`` then names the
        parameters for which some rank's is not finite.

        A gradient that some ranks lack counts as zero there; one that all lack stays None: weight decay and momentum would
        move parameters that no rank used.
        """
        # As they were when the update began: a layer may have been frozen since, and the other ranks wait for it all the same.
        wired = [named for named, is_trainable in zip(self._named, self._trainable, strict=True) if is_trainable]
        names, parameters = [name for name, _ in wired], [parameter for _, parameter in wired]
        used = [float(parameter.grad is not None) for parameter in parameters]
        facts = torch.tensor([*used, *numbers], dtype=torch.float64)
        if largest:  # what is not finite stays so when it is added up
            zero = torch.zeros_like(next(iter(largest.values())))
            facts[: len(used)] += torch.stack([largest.get(name, zero) for name in names]).detach().cpu() * 0.0
        for bucket in self._buckets:
            for place in list(bucket.missing):
                bucket.take(place)
        self._begin_full()
        handle = self.hvd.allreduce_async_(facts, op=self.hvd.Sum, name=f"{self._prefix}used", process_set=self._set)
        sparse = [(parameter, self._gather(name, parameter)) for name, parameter in wired if id(parameter) in self._sparse]
        with start.shutdown_explained(), HERE.waits("allreduce of", self._unfinished):
            for bucket in self._buckets:
                self._carrier.wait(bucket.handle)
        for parameter, (indices, values) in sparse:
            rows, elements = self.hvd.synchronize(indices), self.hvd.synchronize(values)
            parameter.grad = torch.sparse_coo_tensor(rows[None], elements, parameter.shape, check_invariants=False).coalesce()
        sums: list[float] = self.hvd.synchronize(handle).tolist()
        ranks = dict(zip(names, sums[: len(used)], strict=True))
        self.not_finite = [name for name, count in ranks.items() if not math.isfinite(count)]
        for bucket in self._buckets:
            for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if ranks[name] else None
        for name, parameter in wired:
            if not ranks[name]:
                parameter.grad = None
        return sums[len(used) :]

    def pause(self) -> None:
        """Whatever backward passes follow before the next ``begin`` stay on this rank."""
        self._passes = sys.maxsize

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Collective. Copy ``root``'s values to every rank, in place."""
        send = self.hvd.broadcast_async_
        handles = [send(tensor, root_rank=root, name=f"state/{number}") for number, tensor in enumerate(tensors)]
        for handle in handles:
            self.hvd.synchronize(handle)

    def _unfinished(self) -> list[str]:
        """The parameters whose sums are not there yet. For another thread, while ``finish`` waits."""
        waiting = [bucket for bucket in self._buckets if bucket.handle is not None and not self._carrier.is_done(bucket.handle)]
        return [name for bucket in waiting for name in bucket.names]

    def _on_gradient(self, number: int, bucket: Bucket, place: int, parameter: torch.nn.Parameter) -> None:
        self._counts[number] += 1
        if self._counts[number] == self._passes:
            bucket.take(place)
            if not bucket.missing:
                self._begin_full()

    def _begin_full(self) -> None:
        """Begin to sum the full buckets that are next: all ranks in the same order."""
        while self._begun < len(self._buckets) and not self._buckets[self._begun].missing:
            bucket = self._buckets[self._begun]
            bucket.handle = self._carrier.begin(bucket)
            self._begun += 1

    def _wire(self, trainable: tuple[bool, ...]) -> None:
        self._unhook()
        self._trainable = trainable
        named = [(number, name, p) for number, (name, p) in enumerate(self._named) if p.requires_grad]
        if not named:
            raise UsageError("the model has no trainable parameter", "set requires_grad = True on some parameter")
        dense = [each for each in reversed(named) if id(each[2]) not in self._sparse]
        self._buckets = []
        for kind in dict.fromkeys((p.dtype, p.device) for _, _, p in dense):
            alike = [each for each in dense if (each[2].dtype, each[2].device) == kind]
            sizes = [p.numel() * p.element_size() for _, _, p in alike]
            for members in buckets(sizes, self._bucket_bytes):
                self._add([alike[member] for member in members])

    def _add(self, members: Sequence[tuple[int, str, torch.nn.Parameter]]) -> None:
        last = members[-1][1]
        more = f" to {members[0][1]}" if len(members) > 1 else ""
        bucket = Bucket(f"{self._prefix}{last}{more}", {name: parameter for _, name, parameter in members})
        self._buckets.append(bucket)
        for place, (number, _, parameter) in enumerate(members):
            hook: Callable[[torch.nn.Parameter], None] = partial(self._on_gradient, number, bucket, place)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _gather(self, name: str, parameter: torch.nn.Parameter) -> tuple[Any, Any]:
        """Begin to gather the rows that this rank touched; a rank without samples brings none along."""
        gradient = parameter.grad
        if gradient is None:
            rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        gather = self.hvd.allgather_async
        return (
            gather(rows.contiguous(), name=f"{self._prefix}{name}/rows", process_set=self._set),
            gather(values.contiguous(), name=f"{self._prefix}{name}/values", process_set=self._set),
        )


class HorovodExchange:
    """The reducer, with the update of the user's own optimizer on every rank."""

    def __init__(self, reducer: GradientReducer, optimizer: torch.optim.Optimizer) -> None:
        self._reducer, self._optimizer = reducer, optimizer
        self.begin, self.pause = reducer.begin, reducer.pause
        self.broadcast, self.close = reducer.broadcast, reducer.close

    def finish(self, numbers: Sequence[float]) -> Summed:
        return Summed(self._reducer.finish(numbers))

    def gradients(self) -> list[torch.Tensor]:
        return own_gradients(self._optimizer)

    def update(self) -> None:
        torch_fused.step(self._optimizer)

    def settle(self) -> None:
        pass

    def adopt(self) -> None:
        pass


class _Horovod:
    """Horovod's own allreduce, in its thread."""

    def __init__(self, hvd: Any, process_set: Any, op: Any) -> None:
        self._hvd, self._set, self._op = hvd, process_set, op

    def begin(self, bucket: Bucket) -> Any:
        return self._hvd.allreduce_async_(bucket.flat, op=self._op, name=bucket.name, process_set=self._set)

    def is_done(self, handle: Any) -> bool:
        try:
            return bool(self._hvd.poll(handle))
        except (RuntimeError, ValueError):  # released already
            return True

    def wait(self, handle: Any) -> None:
        self._hvd.synchronize(handle)

    def close(self) -> None:
        pass


def _lies_alike(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    return gradient.stride() == parameter.stride() and is_dense(parameter)


def _refuse_dtypes(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    allowed = (torch.float16, torch.float32, torch.float64)
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in allowed:
            raise UsageError(
                f"the parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, whose gradients Horovod cannot add up",
                "keep the parameters in float32, and compute in another precision: Update(precision='bfloat16'), torch.autocast",
            )
