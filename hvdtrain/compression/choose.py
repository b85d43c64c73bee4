"""From what the user writes to a compressor, or to why there is none."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.compression import Compressor
from hvdtrain.compression.halves import Bfloat16, Float16
from hvdtrain.compression.levels import BetweenHosts
from hvdtrain.compression.powersgd import DEFAULT_RANK, PowerSgd
from hvdtrain.compression.topk import DEFAULT_SHARE, TopK
from hvdtrain.compression.warmup import Warmup
from hvdtrain.errors import UsageError, shown
from hvdtrain.update import Op, Precision

_HINT = "--compression none, bfloat16, float16, topk, topk:0.05 (the share that is sent), powersgd or powersgd:2 (the rank)"


def parse(text: str, *, warmup: int = 0) -> Compressor | None:
    """The compressor that ``text`` names, used after the first ``warmup`` steps; None for "none".

    Raises:
        UsageError: it names none, or an argument is out of range.
    """
    if warmup < 0:
        raise UsageError(f"--compression-warmup must be a number of steps, 0 or more, got {warmup}")
    kind, colon, argument = text.partition(":")
    plain: dict[str, Callable[[], Compressor | None]] = {"none": lambda: None, "bfloat16": Bfloat16, "float16": Float16}
    found: Compressor | None
    if kind in plain and not colon:
        found = plain[kind]()
    elif kind == "topk":
        found = TopK(_share(text, argument) if colon else DEFAULT_SHARE)
    elif kind == "powersgd":
        found = PowerSgd(_rank(text, argument) if colon else DEFAULT_RANK)
    else:
        raise UsageError(f"--compression: there is no {shown(text)!r}", _HINT)
    if found is None:
        return None
    found = BetweenHosts(found)
    return Warmup(found, warmup) if warmup else found


def refusal(text: str, *, op: Op, precision: Precision, process_sets: bool, sparse: bool) -> str:
    """Why a run cannot compress as ``text`` says, or an empty string.

    Args:
        op: how gradients meet (``Update.op``).
        precision: of the forward and the backward pass (``Update.precision``).
        process_sets: whether ranks reduce within sets.
        sparse: whether the model has sparse gradients.
    """
    if text == "none":
        return ""
    if op == "adasum":
        return "op='adasum' combines gradients by their angles, pair by pair; a compressor sums them"
    if process_sets:
        return "with process_sets only some ranks reduce with each other; a compressor's collectives are of all ranks"
    if sparse:
        return "sparse gradients travel as the rows that were touched, which is their compression"
    if precision == "float16" and text != "bfloat16":
        return "what a step owes (error feedback) would be in units of its loss scale, which changes; bfloat16 owes nothing"
    return ""


def _share(text: str, argument: str) -> float:
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share <= 0.5:
        raise UsageError(
            f"--compression {shown(text)}: the share must be above 0 and at most 0.5, got {shown(argument)!r}",
            "an element that is sent takes its index along: at half of them nothing is gained. For example: topk:0.01",
        )
    return share


def _rank(text: str, argument: str) -> int:
    if not (argument.isascii() and argument.isdigit() and 1 <= int(argument) <= 1024):
        raise UsageError(
            f"--compression {shown(text)}: the rank must be a whole number from 1 to 1024, got {shown(argument)!r}",
            "for example: powersgd:4",
        )
    return int(argument)
