"""The search on step times that are made up: what is best is known."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.tune import search
from hvdtrain.tune.search import DEFAULTS, Ask, Comparison, Factor, Failed, Interrupted, Measured, Outcome, Reply, Settings

AMPLE = 1e9
#: the factor of each value by which a step takes longer
Effects = Mapping[str, Mapping[str, float]]


@dataclass
class World:
    """Steps of ``step_s`` times the effects of the settings, and up to ``noise`` longer; jobs of ``took_s``."""

    effects: Effects
    noise: float = 0.0
    seed: int = 0
    took_s: Callable[[Settings], float] = lambda asked: 10.0
    broken: frozenset[tuple[str, str]] = frozenset()
    asked: list[Ask] = field(default_factory=list)

    def factors(self, engine: str = "") -> tuple[Factor, ...]:
        return tuple(
            Factor(name, tuple(values), "" if name == search.ENGINE else engine) for name, values in self.effects.items()
        )

    def true(self, asked: Settings) -> float:
        product = 1.0
        for name, value in asked:
            product *= self.effects[name][value]
        return product

    def engine(self, asked: Settings) -> str:
        return dict(asked).get(search.ENGINE, "shared")

    def reply(self, ask: Ask) -> Reply:
        self.asked.append(ask)
        took_s = self.took_s(ask.settings)
        if took_s > ask.limit_s:
            return Failed("it did not end", ask.limit_s)
        if self.broken & set(ask.settings):
            return Failed("it cannot be", took_s)
        drawn = random.Random(f"{self.seed} {len(self.asked)}").random()
        return Measured(self.true(ask.settings) * (1 + self.noise * drawn), took_s, self.engine(ask.settings))


def found(world: World, budget_s: float = AMPLE, stop_after: int | None = None, engine: str = "") -> Outcome:
    asks = search.search(world.factors(engine), budget_s)
    try:
        ask = next(asks)
        while True:
            ask = asks.send(Interrupted() if len(world.asked) == stop_after else world.reply(ask))
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


effects = st.floats(0.5, 3.0)
worlds = st.builds(
    World,
    effects=st.fixed_dictionaries(
        {
            "exchange": st.fixed_dictionaries({"horovod": effects}),
            "bucket": st.fixed_dictionaries({"1": effects, "16": effects, "64": effects}),
            "threads": st.fixed_dictionaries({"2": effects}),
        }
    ),
    noise=st.floats(0.0, 0.05),
    seed=st.integers(0, 1000),
)


@settings(deadline=None)
@given(worlds)
def test_it_finds_the_best_within_the_noise(world: World):
    best = 1.0
    for values in world.effects.values():
        best *= min(1.0, *values.values())
    outcome = found(world)
    assert outcome.is_decided
    # Each of the three factors may be missed by the noise of a comparison, and the confirmation by its own.
    assert world.true(outcome.settings) <= best * (1 + world.noise + 0.02) ** 4


@settings(deadline=None)
@given(worlds)
def test_what_is_stored_is_never_slower_than_the_defaults(world: World):
    assert world.true(found(world).settings) <= 1.0 + world.noise


@settings(deadline=None)
@given(worlds, st.floats(1.0, 2000.0), st.data())
def test_the_budget_is_never_exceeded(world: World, budget_s: float, data: st.DataObject):
    world.took_s = lambda asked: data.draw(st.floats(0.5, 200.0))
    outcome = found(world, budget_s)
    assert outcome.spent_s <= budget_s * (1 + 1e-9)
    assert outcome.settings == DEFAULTS or outcome.is_decided


@settings(deadline=None)
@given(worlds)
def test_a_bad_value_gets_one_try(world: World):
    found(world)
    for stage in ("exchange", "one at a time"):
        tries = Counter(ask.settings for ask in world.asked if ask.stage == stage)
        base = max(tries, key=lambda asked: (tries[asked], -len(asked)))
        for asked, count in tries.items():
            if world.true(asked) > world.true(base) * (1.26 + world.noise) * (1 + world.noise):
                assert count == 1, asked


@settings(deadline=None)
@given(worlds, st.integers(0, 60))
def test_an_interrupt_leaves_what_was_confirmed_or_nothing(world: World, stop_after: int):
    outcome = found(world, stop_after=stop_after)
    assert len(world.asked) <= stop_after
    if outcome.ended_by == "interrupt":
        assert outcome.is_decided == (outcome.comparison is not None and outcome.comparison.is_complete)
        assert outcome.is_decided or outcome.settings == DEFAULTS


def test_values_that_help_are_joined_and_confirmed_against_the_defaults():
    world = World({"exchange": {"horovod": 2.0}, "bucket": {"1": 1.5, "16": 0.8}, "threads": {"2": 0.7}})
    outcome = found(world)
    assert outcome.settings == (("bucket", "16"), ("threads", "2"))
    firsts = {arm.stage: arm.settings for arm in reversed(outcome.arms)}
    assert firsts == {"exchange": (), "one at a time": (), "together": (("threads", "2"),), "confirmation": ()}
    assert outcome.comparison is not None
    assert outcome.comparison.ratio == outcome.comparison.ratio_of_fastest == statistics.median([0.8 * 0.7])
    assert [ask.settings for ask in world.asked if ask.stage == "confirmation"] == [
        DEFAULTS,
        outcome.settings,
        outcome.settings,
        DEFAULTS,
        DEFAULTS,
        outcome.settings,
    ]


def test_factors_of_another_engine_are_left_out_with_the_reason():
    world = World({"exchange": {"shared": 1.0, "horovod": 2.0}, "bucket": {"16": 0.1}})
    outcome = found(world, engine="horovod")
    assert {ask.settings for ask in world.asked} == {DEFAULTS, (("exchange", "horovod"),)}
    assert dict(outcome.left_out) == {(("bucket", ""),): "it is for horovod, and gradients travel by shared"}
    assert outcome.settings == DEFAULTS
    assert outcome.is_decided


def test_factors_of_an_engine_that_won_are_tried_on_top_of_it():
    world = World({"exchange": {"horovod": 0.5}, "bucket": {"16": 0.5}})
    assert found(world, engine="horovod").settings == (("exchange", "horovod"), ("bucket", "16"))


def test_what_cannot_be_is_left_out_with_its_reason_and_the_search_goes_on():
    world = World({"exchange": {"horovod": 2.0}, "bucket": {"1": 0.5, "16": 0.8}}, broken=frozenset({("bucket", "1")}))
    outcome = found(world)
    assert dict(outcome.left_out) == {(("bucket", "1"),): "it cannot be"}
    assert outcome.settings == (("bucket", "16"),)


def test_nothing_is_decided_where_nothing_but_the_defaults_can_be_measured():
    world = World({"exchange": {"horovod": 0.5}, "threads": {"2": 0.5}})
    world.broken = frozenset({("exchange", "horovod"), ("threads", "2")})
    outcome = found(world)
    assert {arm.settings for arm in outcome.arms} == {DEFAULTS}
    assert (outcome.is_decided, outcome.settings, outcome.ended_by, outcome.failure) == (False, DEFAULTS, "", "")


def test_nothing_is_decided_where_what_was_fastest_fails_when_it_is_to_be_confirmed():
    world = World({"exchange": {"horovod": 0.5}})
    asks = search.search(world.factors(), AMPLE)
    ask = next(asks)
    try:
        while True:
            again = ask.stage == "confirmation" and ask.settings != DEFAULTS
            ask = asks.send(Failed("it is gone", 1.0) if again else world.reply(ask))
    except StopIteration as end:
        outcome: Outcome = end.value
    assert outcome.comparison == Comparison((("exchange", "horovod"),), (), ())
    assert (outcome.is_decided, outcome.settings) == (False, DEFAULTS)


def test_without_another_engine_the_first_measurement_counts():
    world = World({"exchange": {}, "bucket": {"1": 2.0}})
    assert found(world).is_decided
    assert [ask.settings for ask in world.asked] == [DEFAULTS, (("bucket", "1"),)]


def test_where_steps_lie_far_apart_one_round_decides_nothing():
    def tries(noise: float) -> int:
        world = World({"exchange": {"horovod": 1.5}})
        asks = search.search(world.factors(), AMPLE)
        ask, count = next(asks), 0
        try:
            while True:
                count += ask.settings != DEFAULTS
                reply = world.reply(ask)
                assert isinstance(reply, Measured)
                ask = asks.send(replace(reply, noise=noise))
        except StopIteration:
            return count

    assert (tries(0.1), tries(0.6)) == (1, 2)


def test_a_job_that_takes_far_longer_than_the_defaults_is_ended():
    slow = (("bucket", "1"),)
    world = World({"exchange": {}, "bucket": {"1": 0.5}}, took_s=lambda asked: 1000.0 if asked == slow else 10.0)
    assert dict(found(world).left_out) == {slow: "it did not end"}
    assert [ask.limit_s for ask in world.asked if ask.settings == slow] == [30.0]


def test_defaults_that_cannot_be_measured_end_the_search():
    world = World({"exchange": {"horovod": 1.0}}, took_s=lambda asked: 100.0)
    outcome = found(world, budget_s=50.0)
    assert outcome.failure == "it did not end"
    assert not outcome.is_decided


def test_a_budget_without_room_for_a_comparison_says_how_much_it_takes():
    world = World({"exchange": {"horovod": 0.5}})
    outcome = found(world, budget_s=50.0)
    assert (outcome.ended_by, outcome.is_decided) == ("budget", False)
    assert outcome.forecast is not None
    least_s = outcome.forecast.least_s
    # It is what a search needs, and hardly more.
    assert found(World({"exchange": {"horovod": 0.5}}), budget_s=least_s).is_decided
    assert not found(World({"exchange": {"horovod": 0.5}}), budget_s=0.8 * least_s).is_decided


@settings(deadline=None)
@given(worlds)
def test_the_budget_that_is_named_for_all_there_is_to_try_is_enough_for_a_decision(world: World):
    world.took_s = lambda asked: 10.0
    whole_s = search.forecast(world.factors(), [10.0]).whole_s
    assert found(world, budget_s=whole_s).is_decided


def test_a_first_job_that_took_long_does_not_end_the_search():
    world = World({"exchange": {"horovod": 0.5}})
    world.took_s = lambda asked: 10.0 if len(world.asked) > 1 else 30.0
    outcome = found(world, budget_s=160.0)
    assert outcome.settings == (("exchange", "horovod"),)
    assert outcome.spent_s <= 160.0


def test_a_gain_needs_both_measures_to_be_beyond_the_noise():
    def gain(defaults_s: tuple[float, ...], settings_s: tuple[float, ...]) -> bool:
        return Comparison((("bucket", "1"),), defaults_s, settings_s).is_gain

    assert gain((1.0, 1.01, 1.02), (0.9, 0.91, 0.92))
    assert not gain((1.0, 1.01, 1.02), (0.9, 1.01, 1.02))
    assert not gain((0.9, 1.01, 1.02), (0.9, 0.91, 0.92))
    assert not gain((0.8, 1.0, 1.2), (0.7, 0.9, 1.3))
    assert not gain((1.0, 1.0), (0.5, 0.5))
