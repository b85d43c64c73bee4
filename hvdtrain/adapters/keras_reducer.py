"""From this rank's gradients to the one that is applied: one reduction over the ranks, then scaling and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.exchange import Exchange, buckets
from hvdtrain.horovod import require, start
from hvdtrain.update import Update

#: gradients up to this size share buffers: a reduction costs about a millisecond, whatever its size
_FUSED_ELEMENTS = 1 << 18


class Reducer:
    """Reduces gradients as an ``Update`` says. Without ``connect`` it is that of a single process.

    Args:
        sets: the ranks that reduce with each other, as an ``Update``'s ``process_sets``, but with op="exact".
    """

    def __init__(
        self,
        update: Update,
        prefix: str = "",
        bucket_mb: float = Exchange.bucket_mb,
        sets: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.update, self._prefix, self._limit = update, prefix, int(bucket_mb * (1 << 20))
        self._sets = sets or update.process_sets
        #: ranks that reduce with each other
        self.size = 1
        #: this rank's place among them
        self.rank = 0
        self._allreduce: Callable[..., Any] | None = None

    def connect(self, rank: int, size: int) -> Any:
        """Collective. Start Horovod on ``size`` ranks; it is returned.

        Raises:
            HvdtrainError: it is not installed for TensorFlow, or these ranks cannot reduce so.
        """
        require("tensorflow")
        import horovod.tensorflow as hvd

        ours = start.init(hvd, self._sets)
        is_part = len(self._sets) > 1
        self.size, self.rank = (ours.size(), ours.rank()) if is_part else (size, rank)

        def allreduce(tensor: Any, name: str, op: Any = hvd.Sum) -> Any:
            # Named by us, not by TensorFlow, whose names count traces and would differ between ranks.
            return hvd.allreduce(tensor, op=op, name=self._prefix + name, ignore_name_scope=True, process_set=ours)

        self._allreduce, self._op = allreduce, hvd.Adasum if self.update.op == "adasum" else hvd.Sum
        return hvd

    def sum(self, tensor: Any, name: str) -> Any:
        """Collective. The sum over the ranks that reduce with each other."""
        return tensor if self._allreduce is None else self._allreduce(tensor, name)

    def __call__(self, gradients: Sequence[Any], counted: Any, scale: Any) -> tuple[list[Any], Any]:
        """Collective.

        Args:
            gradients: dense, already times what this rank counts for.
            counted: what this rank counts for, where only the sum over ranks is the whole; None elsewhere.
            scale: what the loss was multiplied with to keep small gradients in float16.

        Returns:
            gradients, still times ``scale``, and their global norm without it: not finite if any of them is not.
        """
        fused = self.update.op != "adasum"  # which weighs each tensor by itself
        # Backward makes the last layer's gradients first: what is ready first is reduced first, while the others are made.
        small = [n for n in reversed(range(len(gradients))) if fused and _is_small(gradients[n])]
        large = [n for n in range(len(gradients)) if n not in set(small)]
        sizes = [gradients[n].shape.num_elements() * 4 for n in small]
        groups = [[small[place] for place in group] for group in buckets(sizes, self._limit)]
        buffers = [self._reduced(gradients[n], f"gradient.{n}") for n in large]
        factor: Any = self.update.postscale
        if counted is not None and not groups:
            groups = [[]]
        for place, group in enumerate(groups):
            pieces = [tf.reshape(gradients[n], [-1]) for n in group]
            is_last = counted is not None and place == len(groups) - 1
            flat = self._reduced(tf.concat([*pieces, tf.reshape(counted, [1])] if is_last else pieces, 0), f"gradients.{place}")
            if is_last:
                flat, total = flat[:-1], flat[-1]
                factor = tf.math.divide_no_nan(tf.constant(factor, tf.float32), total)
            buffers.append(flat)
        buffers, norm = self._finish(buffers, factor, scale)
        result: list[Any] = list(gradients)
        for n, buffer in zip(large, buffers, strict=False):
            result[n] = buffer
        for group, buffer in zip(groups, buffers[len(large) :], strict=True):
            split = tf.split(buffer, [gradients[n].shape.num_elements() for n in group]) if group else []
            for n, piece in zip(group, split, strict=True):
                result[n] = tf.reshape(piece, gradients[n].shape)
        return result, norm

    def _reduced(self, tensor: Any, name: str) -> Any:
        return tensor if self._allreduce is None else self._allreduce(tensor, name, self._op)

    def _finish(self, buffers: list[Any], factor: Any, scale: Any) -> tuple[list[Any], Any]:
        if not (isinstance(factor, float) and factor == 1.0):
            buffers = [buffer * tf.cast(factor, buffer.dtype) for buffer in buffers]
        limit, most = self.update.clip_norm, self.update.clip_value
        # In float64 where the gradients depend on it: hosts that add up in another order still get the same factor.
        kind = tf.float32 if limit is None else tf.float64
        halves = [tf.nn.l2_loss(tf.cast(buffer, kind)) for buffer in buffers]
        norm = tf.sqrt(2 * tf.add_n(halves))
        if not (isinstance(scale, float) and scale == 1.0):
            norm /= tf.cast(scale, kind)
        if limit is not None:
            shrink = tf.minimum(tf.constant(1.0, kind), tf.math.divide_no_nan(tf.constant(limit, kind), norm))
            shrink = tf.where(norm > 0, shrink, tf.ones_like(shrink) + norm)  # of NaN it stays NaN
            buffers = [buffer * tf.cast(shrink, buffer.dtype) for buffer in buffers]
        if most is not None:
            finite = tf.math.is_finite(norm)  # a clipped infinity would pass for a gradient
            most = most * tf.cast(scale, tf.float32)
            limits = [tf.cast(most, buffer.dtype) for buffer in buffers]
            pairs = zip(buffers, limits, strict=True)
            buffers = [tf.where(finite, tf.clip_by_value(buffer, -limit, limit), buffer) for buffer, limit in pairs]
        return buffers, tf.cast(norm, tf.float32)


def _is_small(gradient: Any) -> bool:
    return bool(gradient.dtype == tf.float32 and gradient.shape.num_elements() <= _FUSED_ELEMENTS)
