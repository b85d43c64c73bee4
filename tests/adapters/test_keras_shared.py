"""Who adds up and updates what, when ranks share memory. The sums themselves: tests/exactness."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("keras")

import keras

from hvdtrain.adapters import keras_shared
from hvdtrain.adapters.keras_shared import layout
from hvdtrain.update import Update


def variables():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(20), keras.layers.Dense(7)])
    return model.trainable_variables


def laid_out(optimizer, chosen=None):
    chosen = variables() if chosen is None else chosen
    optimizer.build(chosen)
    return layout(chosen, optimizer)


def test_variables_begin_on_cache_lines_and_those_that_decay_come_first():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    found = laid_out(optimizer)
    assert found.decays == (True, False, True, False)
    assert found.offsets == [0, 208, 64, 228 // 16 * 16 + 16]
    assert found.length == 256
    assert found.slots == ("_momentums", "_velocities")


@pytest.mark.parametrize("optimizer", [kind.__name__ for kind in keras_shared.ELEMENT_WISE])
def test_all_state_of_the_element_wise_optimizers_is_found(optimizer):
    assert laid_out(getattr(keras.optimizers, optimizer)()).whole == ""


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.Adafactor(), "Adafactor is not known to update each element by itself"),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), "clipnorm of SGD looks at more than single elements"),
        (lambda: keras.optimizers.SGD(use_ema=True), "use_ema of SGD"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps of SGD"),
        (lambda: type("Mine", (keras.optimizers.SGD,), {})(), "Mine is not known"),
    ],
    ids=["adafactor", "clipnorm", "ema", "accumulation", "own"],
)
def test_other_optimizers_update_everything_on_each_rank_and_say_why(optimizer, words):
    assert laid_out(optimizer()).whole.startswith(words)


def test_a_constraint_looks_at_whole_variables():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_constraint="max_norm")])
    assert laid_out(keras.optimizers.SGD(), model.trainable_variables).whole.endswith("kernel has a constraint")


def test_variables_that_are_not_float32_are_not_shared():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    assert "is bfloat16, and float32 is added" in laid_out(keras.optimizers.SGD(), model.trainable_variables)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("used", [(0, 1, 2, 3), (1, 3), (2,)])
def test_each_element_of_the_used_variables_belongs_to_one_rank(ranks, used):
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    found = laid_out(optimizer)
    owners = [0] * found.length
    for rank in range(ranks):
        pieces = list(keras_shared._cut(found, used, rank, ranks))
        for piece, decays in pieces:
            assert piece.start % 16 == 0
            assert decays == (piece.start < 208)
            for element in range(piece.start, piece.stop):
                owners[element] += 1
    for number in range(4):
        place = found.place(number)
        assert set(owners[place]) == {int(number in used)}


def test_a_variable_is_cut_where_the_pieces_begin_and_end():
    pieces = [(slice(16, 32), True), (slice(48, 64), False)]
    assert list(keras_shared._split(slice(0, 60), pieces)) == [
        (0, 16, False),
        (16, 32, True),
        (32, 48, False),
        (48, 60, True),
    ]
    assert list(keras_shared._split(slice(0, 10), pieces)) == [(0, 10, False)]


def test_small_neighbours_travel_as_one():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    found = laid_out(optimizer)
    assert keras_shared._blocks(found, (0, 1, 2, 3)) == [(slice(0, 247), [0, 2, 1, 3])]
    assert keras_shared._blocks(found, (3, 0)) == [(slice(0, 60), [1]), (slice(240, 247), [0])]


def test_large_gradients_travel_by_themselves(monkeypatch):
    monkeypatch.setattr(keras_shared, "_CHUNK", 210)
    optimizer = keras.optimizers.SGD()
    chosen = variables()
    found = laid_out(optimizer, chosen)
    assert [place for place, _ in keras_shared._blocks(found, (0, 1, 2, 3))] == [slice(0, 84), slice(96, 247)]


@pytest.mark.parametrize(("size", "count"), [(64, 1), (keras_shared._CHUNK + 16, 0)], ids=["small", "large"])
def test_an_update_returns_a_small_share_of_the_parameters(size, count):
    variable = keras.Variable(np.ones(size, np.float32))
    optimizer = keras.optimizers.SGD(0.5)
    found = laid_out(optimizer, [variable])
    whole = np.zeros(found.length + 16, np.float32)
    flat = whole[-(whole.ctypes.data // 4) % 16 :][: found.length]  # begins on a cache line
    parts = keras_shared._Parts(found, (0,), 0, [flat], optimizer, Update())
    parts.begin([np.ones(found.length, np.float32)])
    flat[:] = 1.0
    parts.update(1.0, math.inf)
    assert len(parts._updated) == count
    parameters = np.zeros(found.length, np.float32)
    parts.publish(parameters)
    assert parameters.tolist() == [0.5] * size
