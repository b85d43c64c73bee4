"""Which setting to try next, from what was measured so far. Pure: gives asks, takes replies, and returns what it found.

1. The engine of the exchange decides what else can matter, so it is settled first.
2. One factor at a time differs from that. All tries take turns, round after round; of a factor's values, one whose fastest
   round is slower than the factor's best by more than the noise is not tried again (successive elimination: Even-Dar, Mannor
   and Mansour, 2006).
3. The values that helped are tried together, against the best of them alone.
4. What has won runs against the defaults, in turns and anew: whoever wins a race among many is partly lucky.

Times are seconds; a step's time is one number for each job.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

#: (factor, value) of everything that differs from the defaults, in the order in which factors are given
Settings = tuple[tuple[str, str], ...]
DEFAULTS: Settings = ()

#: The factor that decides on the engine, and by that on the others.
ENGINE = "exchange"

_ROUNDS = 3
#: Of a value, in the mean: those that are far off have one.
_USUAL_ROUNDS = 2
#: Rounds of the defaults and of what has won: as many at least, and at most where they are close.
_CONFIRM, _CONFIRM_MOST = 3, 5
#: The least noise that is assumed before anything was measured twice, and after that.
_NOISE_AT_FIRST, _NOISE_LEAST = 0.25, 0.02
#: What helps by less is not worth being kept.
_LEAST_GAIN = 0.01
#: The part of the very first job's time that the next ones are taken to need: they find in memory what it has read from disks.
_COLD = 0.5
#: Room for the jobs that must still fit, as they rarely take as long as the typical one.
_MARGIN = 1.25
#: A job may take so many times as long as the longest of the defaults' did.
_PATIENCE = 3.0


@dataclass(frozen=True)
class Factor:
    """Something that can be set. ``values`` are those to try beside the default.

    ``engine``: it matters only where gradients travel by this one; empty: always.
    """

    name: str
    values: tuple[str, ...]
    engine: str = ""


@dataclass(frozen=True)
class Ask:
    """Run a job with these settings, and end it when it has not ended after ``limit_s``."""

    settings: Settings
    limit_s: float
    #: what this is a part of, for people
    stage: str


@dataclass(frozen=True)
class Measured:
    #: of the recipe, in this job
    step_s: float
    #: of the job, from its start to its end
    took_s: float
    #: by which gradients travelled
    engine: str = ""
    #: how far the steps of this job lie apart, as a part of their median
    noise: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The job ended without a figure, or was ended."""

    reason: str
    took_s: float


@dataclass(frozen=True)
class Interrupted:
    """The user wants no more."""


Reply = Measured | Failed | Interrupted


@dataclass(frozen=True)
class Arm:
    """One setting in one stage: the step's seconds in each of its jobs."""

    stage: str
    settings: Settings
    rounds_s: tuple[float, ...]
    dropped: bool


@dataclass(frozen=True)
class Comparison:
    """Rounds of the defaults and of other settings that took turns."""

    settings: Settings
    defaults_s: tuple[float, ...]
    settings_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Of the medians: below 1, the settings are faster."""
        return statistics.median(self.settings_s) / statistics.median(self.defaults_s)

    @property
    def ratio_of_fastest(self) -> float:
        return min(self.settings_s) / min(self.defaults_s)

    @property
    def noise(self) -> float:
        return max(_LEAST_GAIN, _noise([self.defaults_s, self.settings_s]))

    @property
    def is_complete(self) -> bool:
        return min(len(self.defaults_s), len(self.settings_s)) >= _CONFIRM

    @property
    def is_gain(self) -> bool:
        """Whether the settings are faster by more than the noise, by both measures."""
        return self.is_complete and 1 - max(self.ratio, self.ratio_of_fastest) > self.noise


@dataclass(frozen=True)
class Forecast:
    """Seconds for all jobs, as they look when one has been run.

    Attributes:
        least_s: for the least that can find something out: the defaults, one setting, and their comparison.
        whole_s: for a search of everything, as long as those usually take.
    """

    least_s: float
    whole_s: float


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        arms: everything that was measured; the first of a stage is what the others are compared with.
        comparison: of the defaults with what has won, as far as it came; None if nothing was faster than they.
        left_out: settings that cannot be or cannot matter here, with the reason; a factor without a value is all of its values.
        spent_s: of the budget.
        forecast: as the jobs took that gave a figure; None if none did.
        ended_by: "budget" or "interrupt" if it ended before it was through, else empty.
        failure: why the defaults could not be measured.
    """

    arms: tuple[Arm, ...]
    comparison: Comparison | None
    left_out: tuple[tuple[Settings, str], ...]
    spent_s: float
    forecast: Forecast | None = None
    ended_by: str = ""
    failure: str = ""

    @property
    def settings(self) -> Settings:
        """What is worth being used: the defaults, unless something was faster by more than the noise."""
        return self.comparison.settings if self.comparison is not None and self.comparison.is_gain else DEFAULTS

    @property
    def is_decided(self) -> bool:
        """Whether ``settings`` is an answer, not what is left where the search was cut off or had nothing to compare."""
        if self.comparison is not None:
            return self.comparison.is_complete
        return not self.failure and not self.ended_by and any(arm.settings != DEFAULTS for arm in self.arms)


def search(factors: Sequence[Factor], budget_s: float) -> Generator[Ask, Reply, Outcome]:
    """Find the fastest settings. The jobs together take no longer than ``budget_s`` if each ends at its limit."""
    state = _State(tuple(factor.name for factor in factors), budget_s)
    comparison: Comparison | None = None
    try:
        best = yield from _first(state, factors)
        if best is not None and (best := (yield from _others(state, factors, best))) != DEFAULTS:
            comparison = yield from _confirmed(state, best)
    except _EndedError as end:
        state.ended_by = end.args[0]
        if state.confirming is not None:
            comparison = state.confirming
    return Outcome(
        arms=tuple(arm.frozen() for arm in state.arms if arm.rounds_s),
        comparison=comparison,
        left_out=tuple(state.left_out.items()),
        spent_s=state.spent_s,
        forecast=forecast([each for each in factors if ((each.name, ""),) not in state.left_out], state.took_s)
        if state.took_s
        else None,
        ended_by=state.ended_by,
        failure=state.failure,
    )


def forecast(factors: Sequence[Factor], took_s: Sequence[float]) -> Forecast:
    """From how long the jobs took so far, one at least; the next ones take as long at most."""
    values = sum(len(factor.values) for factor in factors)
    first_s, typical_s = took_s[0], statistics.median(took_s)
    confirmed = _MARGIN * 2 * _CONFIRM
    # The race, and what is joined, have the reference in each round.
    rounds = _MARGIN * (_USUAL_ROUNDS * values + 3 * _ROUNDS)
    return Forecast(first_s + typical_s * (1 + confirmed), first_s + typical_s * (rounds + confirmed))


def replaced(settings: Settings, changes: Iterable[tuple[str, str]], order: Sequence[str]) -> Settings:
    """``settings`` with other values for some factors, in the order of ``order``."""
    merged = dict(settings) | dict(changes)
    return tuple((name, merged[name]) for name in order if name in merged)


def _first(state: _State, factors: Sequence[Factor]) -> Generator[Ask, Reply, Settings | None]:
    """The better engine; None if not even the defaults can be measured."""
    stage = "exchange"
    default = state.arm(stage, DEFAULTS)
    yield from state.try_once(default, in_reserve=0)
    if not default.rounds_s:
        state.failure = state.left_out.pop(DEFAULTS)
        return None
    engine = state.engines[DEFAULTS]
    values = [value for factor in factors if factor.name == ENGINE for value in factor.values if value != engine]
    arms = [state.arm(stage, ((ENGINE, value),)) for value in values]
    if arms:
        yield from _race(state, default, [arms])
    better = (arm for arm in arms if arm.rounds_s and arm.is_faster_than(default))
    return min(better, key=_Tried.median_s, default=default).settings


def _others(state: _State, factors: Sequence[Factor], base: Settings) -> Generator[Ask, Reply, Settings]:
    """The best settings around ``base``."""
    engine = state.engines[base]
    groups: list[list[_Tried]] = []
    stage = "one at a time"
    raced = len(state.arms) > 1
    reference = state.arm(stage, base) if raced else state.arms[0]
    reference.stage = stage
    for factor in (factor for factor in factors if factor.name != ENGINE and factor.values):
        if factor.engine and factor.engine != engine:
            state.left_out[((factor.name, ""),)] = f"it is for {factor.engine}, and gradients travel by {engine or 'nothing'}"
        else:
            tried = [replaced(base, [(factor.name, value)], state.order) for value in factor.values]
            groups.append([state.arm(stage, settings) for settings in tried])
    if not groups:
        return base
    yield from _race(state, reference, groups)
    if not reference.rounds_s:
        return base
    winners = [min((arm for arm in group if arm.rounds_s), key=_Tried.median_s, default=reference) for group in groups]
    winners = sorted((arm for arm in winners if arm.is_faster_than(reference)), key=_Tried.median_s)
    if len(winners) < 2:
        return winners[0].settings if winners else base
    together = replaced(base, [pair for arm in winners for pair in arm.settings], state.order)
    alone, all_of_them = (state.arm("together", settings) for settings in (winners[0].settings, together))
    yield from _race(state, alone, [[all_of_them]])
    return min((arm for arm in (alone, all_of_them) if arm.rounds_s), key=_Tried.median_s, default=winners[0]).settings


def _race(state: _State, reference: _Tried, groups: Sequence[Sequence[_Tried]]) -> Generator[Ask, Reply, None]:
    """Rounds of the reference and of everything that may still be its group's best."""
    for number in range(_ROUNDS):
        live = [arm for group in groups for arm in group if not arm.dropped]
        if not live:
            return
        turn = [reference, *live] if number % 2 == 0 else [*reversed(live), reference]
        for arm in turn:
            if len(arm.rounds_s) > number:  # it was the very first
                continue
            if not (yield from state.try_once(arm, in_reserve=2 * _CONFIRM)):
                return
        noise = state.noise()
        for group in groups:
            best = min([reference, *group], key=_Tried.median_s)
            for arm in group:
                arm.dropped = arm.dropped or arm.rounds_s == [] or min(arm.rounds_s) > best.median_s() * (1 + noise)


def _confirmed(state: _State, settings: Settings) -> Generator[Ask, Reply, Comparison]:
    """The defaults against ``settings``, as far as there is time for it and none fails."""
    stage = "confirmation"
    state.confirming = Comparison(settings, (), ())
    defaults, others = state.arm(stage, DEFAULTS), state.arm(stage, settings)
    for number in range(_CONFIRM_MOST):
        for arm in (defaults, others) if number % 2 == 0 else (others, defaults):
            if not (yield from state.try_once(arm, in_reserve=0)) or arm.dropped:
                return state.confirming
        state.confirming = found = Comparison(settings, tuple(defaults.rounds_s), tuple(others.rounds_s))
        if found.is_complete and (found.is_gain or found.ratio > 1):
            break
    return state.confirming


class _EndedError(Exception):
    """The search ends here; why."""


@dataclass
class _Tried:
    stage: str
    settings: Settings
    rounds_s: list[float] = field(default_factory=list)
    dropped: bool = False

    def median_s(self) -> float:
        return statistics.median(self.rounds_s) if self.rounds_s else float("inf")

    def is_faster_than(self, other: _Tried) -> bool:
        medians, fastest = self.median_s() / other.median_s(), min(self.rounds_s) / min(other.rounds_s)
        return 1 - max(medians, fastest) > _LEAST_GAIN

    def frozen(self) -> Arm:
        return Arm(self.stage, self.settings, tuple(self.rounds_s), self.dropped)


@dataclass
class _State:
    order: tuple[str, ...]
    budget_s: float
    spent_s: float = 0.0
    arms: list[_Tried] = field(default_factory=list)
    engines: dict[Settings, str] = field(default_factory=dict)
    left_out: dict[Settings, str] = field(default_factory=dict)
    confirming: Comparison | None = None
    ended_by: str = ""
    failure: str = ""
    #: within each job
    noises: list[float] = field(default_factory=list)
    #: of the jobs that gave a figure
    _took_s: dict[Settings, list[float]] = field(default_factory=dict)

    def arm(self, stage: str, settings: Settings) -> _Tried:
        self.arms.append(_Tried(stage, settings))
        return self.arms[-1]

    def noise(self) -> float:
        """How far rounds of one setting lie apart, as a part of their median."""
        twice = [arm.rounds_s for arm in self.arms if len(arm.rounds_s) > 1]
        return max(_NOISE_LEAST, _noise(twice)) if twice else max(_NOISE_AT_FIRST, statistics.median(self.noises))

    @property
    def took_s(self) -> list[float]:
        """How long each job took."""
        return [took_s for each in self._took_s.values() for took_s in each]

    def try_once(self, arm: _Tried, *, in_reserve: int) -> Generator[Ask, Reply, bool]:
        """One more round of ``arm``, if as many jobs as are ``in_reserve`` can follow it; whether there was time for it."""
        typical_s, longest_s = _typical_s(self.took_s), max(self.took_s, default=0.0)
        left_s = self.budget_s - self.spent_s - in_reserve * typical_s * _MARGIN
        if left_s <= 0 or left_s < statistics.median(self._took_s.get(arm.settings, [typical_s])):
            self.ended_by = "budget"
            return False
        limit_s = min(left_s, _PATIENCE * longest_s) if longest_s else left_s
        reply = yield Ask(arm.settings, limit_s, arm.stage)
        if isinstance(reply, Interrupted):
            raise _EndedError("interrupt")
        self.spent_s += reply.took_s
        if isinstance(reply, Failed):
            arm.dropped = True
            self.left_out[arm.settings] = reply.reason
            return True
        arm.rounds_s.append(reply.step_s)
        self.engines[arm.settings] = reply.engine
        self.noises.append(reply.noise)
        self._took_s.setdefault(arm.settings, []).append(reply.took_s)
        return True


def _typical_s(took_s: Sequence[float]) -> float:
    """How long the next job is going to take."""
    return statistics.median(took_s) if len(took_s) > 1 else _COLD * sum(took_s)


def _noise(rounds: Sequence[Sequence[float]]) -> float:
    """The mean distance of the fastest round from the median one, as a part of it.

    What is slower than the median says more about the machine than about the setting.
    """
    return statistics.mean(1 - min(each) / statistics.median(each) for each in rounds)
