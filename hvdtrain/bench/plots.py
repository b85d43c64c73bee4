"""Bus bandwidth over size, drawn as SVG: a file that every browser shows, made without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hvdtrain.bench import sizes
from hvdtrain.bench.results import Allreduce
from hvdtrain.errors import UsageError

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 480, 80, 150, 50, 60
#: Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_LIMIT = "#888888"

Points = Sequence[tuple[int, float]]


def bandwidth(report: Allreduce) -> str:
    """The SVG of ``report``: bus bandwidth of each carrier and of the limit over size, both on logarithmic axes."""
    ranks = report.setup.ranks
    lines: dict[str, Points] = {
        name: [(each.bytes, each.bus_bytes_per_s) for each in report.sums if each.carrier == name] for name in report.carriers
    }
    bound = [(limit.bytes, 2 * (ranks - 1) / ranks * limit.bytes / limit.seconds) for limit in report.limits]
    every = [point for points in (*lines.values(), bound) for point in points]
    axes = _Axes([x for x, _ in every], [y for _, y in every])
    parts = [*axes.grid()]
    for number, (name, points) in enumerate(lines.items()):
        parts += axes.line(name, points, _COLOURS[number % len(_COLOURS)], number)
    if bound:
        parts += axes.line("limit", bound, _LIMIT, len(lines), dashed=True)
    title = f"allreduce on {ranks} ranks, {report.setup.nodes} {'hosts' if report.setup.nodes > 1 else 'host'}: bus bandwidth"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="28" font-size="17">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def write(path: Path, svg: str) -> None:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


class _Axes:
    """From sizes and bandwidths to places in the drawing."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._xs = sorted(set(xs))
        self._x = math.log(min(xs)), math.log(max(xs))
        self._y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def x(self, value: float) -> float:
        low, high = self._x
        part = (math.log(value) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self._y
        part = (math.log10(value) - low) / (high - low) if high > low else 0.5
        return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for power in range(self._y[0], self._y[1] + 1):
            y = self.y(10.0**power)
            parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#dddddd"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_rate(power)}</text>')
        for size in self._xs:
            x = self.x(size)
            parts.append(f'<path d="M{x} {_TOP}V{bottom}" stroke="#eeeeee"/>')
            parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" font-size="10">{sizes.text(int(size))}</text>')
        return parts

    def line(self, name: str, points: Points, colour: str, place: int, *, dashed: bool = False) -> list[str]:
        """A line with its points, whose values show under the mouse, and its name."""
        path = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
        for x, y in points:
            told = escape(f"{name}, {sizes.text(x)}: {y / 1e9:.3g} GB/s")
            parts.append(f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="3.5" fill="{colour}"><title>{told}</title></circle>')
        at = _TOP + 16 + 22 * place
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 16} {at}h24" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 48}" y="{at + 4}">{escape(name)}</text>')
        return parts


def _rate(power: int) -> str:
    unit, base = next(((unit, base) for unit, base in (("GB/s", 9), ("MB/s", 6), ("kB/s", 3)) if power >= base), ("B/s", 0))
    return f"{10.0 ** (power - base):g} {unit}"
