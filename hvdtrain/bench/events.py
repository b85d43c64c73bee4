"""What rank 0 tells while it measures: values, and lines of text where they go through a pipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.bench import results
from hvdtrain.bench.results import Report

#: How a line begins that is an event.
_MARK = "hvdtrain-bench "


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` things are measured, ``what`` comes next."""

    done: int
    total: int
    what: str


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Finished:
    report: Report


Event = Progress | Note | Finished
Observer = Callable[[Event], None]


def encode(event: Event) -> str:
    if isinstance(event, Finished):
        return _MARK + json.dumps({"report": results.to_json(event.report)})
    return _MARK + json.dumps(vars(event))


def decode(line: str) -> Event | None:
    """The event that a line is; None for any other line."""
    mark, _, text = line.partition(_MARK)
    if mark or not text:
        return None
    values = json.loads(text)
    if "report" in values:
        return Finished(results.from_json(values["report"]))
    return Note(**values) if "text" in values else Progress(**values)
