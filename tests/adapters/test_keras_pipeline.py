"""Keras models on several stages, which are threads of this process: what they compute is what one process does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.metrics import Means
from hvdtrain.pipeline.wanted import Pipelining
from hvdtrain.update import Update
from hvdtrain.world import World
from tests.support.pipeline import together

keras = pytest.importorskip("keras")
layers = keras.layers

CROSS_ENTROPY = {"from_logits": True}
#: what differs from one stage
WAYS: dict[str, dict[str, Any]] = {
    "2 stages": {"stages": 2},
    "3 stages": {"stages": 3},
    "gpipe of 3 micro-batches": {"stages": 2, "schedule": "gpipe", "micro_batches": 3},
    "recomputed": {"stages": 2, "recompute": True},
    "interleaved": {"stages": 2, "schedule": "interleaved", "virtual_stages": 2},
}
#: of weights after several steps, to their largest
CLOSE = 1e-5


@dataclass
class Trained:
    """What all stages together have."""

    before: dict[str, np.ndarray] = field(default_factory=dict)
    after: dict[str, np.ndarray] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    means: Means = field(default_factory=dict)
    adapters: list[Any] = field(default_factory=list)


def sparse_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pipeline(make, optimizer="adam", **more):
    """An adapter, from the same random numbers each time."""
    from hvdtrain.adapters.keras_pipeline import KerasPipeline

    keras.utils.set_random_seed(3)
    return KerasPipeline(make, optimizer, **{"loss": sparse_loss(), **more})


def train(make, batches, *, stages=1, adapter=pipeline, lr=0.01, load=None, **more) -> Trained:
    """Train on ``batches``, and evaluate the first of them."""
    options = {name: more.pop(name) for name in list(more) if name in Pipelining.__dataclass_fields__}

    def work(comm):
        made = adapter(make, **more)
        made.arrange(comm, Pipelining(stages=stages, **options), lambda mesh: batches[0])
        made.setup(comm)
        if load is not None and comm.world.is_primary:
            made.load(load)
        made.sync()
        before = {name: array.copy() for name, array in made.tensors()}
        means = [made.train_step(batch, lr=lr, weight=1.0, seed=step) for step, batch in enumerate(batches)]
        made.settle()
        figures = made.eval_step(batches[0])
        return before, dict(made.tensors()), [each["loss"].value for each in means], figures, made

    found = Trained()
    for before, after, losses, means, made in together(stages, work):
        for mine, all_of_them in ((before, found.before), (after, found.after)):
            for name, array in mine.items():
                assert np.array_equal(array, all_of_them.setdefault(name, array)), f"stages differ in {name}"
        found.losses, found.means = losses, means
        found.adapters.append(made)
    return found


def difference(first, second) -> float:
    """The largest, of each array to its largest element."""
    assert first.keys() == second.keys()
    return max(
        float(np.abs(array.astype(float) - second[name]).max()) / max(float(np.abs(array).max()), 1e-6)
        for name, array in first.items()
    )


def images(count=13, batches=4):
    draw = np.random.default_rng(0)
    return [(draw.standard_normal((count, 5), np.float32), draw.integers(0, 3, count)) for _ in range(batches)]


def letters(lengths=(7, 7, 7, 7), count=11, words=20):
    """Sequences that end in zeros, each in another number of them; so do the targets."""
    draw = np.random.default_rng(1)
    found = []
    for length in lengths:
        there = np.arange(length) < draw.integers(2, length + 1, (count, 1))
        found.append(tuple(draw.integers(1, words, (count, length)) * there for _ in range(2)))
    return found


def mlp():
    return keras.Sequential([keras.Input((5,)), *[layers.Dense(9, activation="tanh") for _ in range(4)], layers.Dense(3)])


def skips():
    """What comes in, and what the first layer makes, is used until the end; there are two towers and an operation."""
    inputs = keras.Input((5,))
    first = layers.Dense(7, activation="tanh")(inputs)
    left, right = layers.Dense(7)(first), layers.Dense(7, activation="tanh")(first)
    middle = keras.ops.maximum(left, right)
    for _ in range(3):
        middle = layers.Add()([layers.Dense(7, activation="tanh")(middle), first])
    return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([middle, inputs])))


def tied():
    """The first and the last layer have the same weights, and so have two in between."""
    words = keras.Input((None,), dtype="int32")
    embedding, inner = layers.ReversibleEmbedding(20, 8), layers.Dense(8, activation="tanh")
    value = embedding(words)
    for _ in range(2):
        value = inner(layers.LayerNormalization()(value))
    return keras.Model(words, embedding(value, reverse=True))


def transformer():
    """With masks, and attention."""
    words = keras.Input((None,), dtype="int32")
    value = layers.Embedding(20, 8, mask_zero=True)(words)
    attention = layers.MultiHeadAttention(2, 4, use_bias=False)  # the gradient of a key's bias is nothing but rounding
    value = layers.Add()([value, attention(value, value, use_causal_mask=True)])
    value = layers.LayerNormalization()(value)
    return keras.Model(words, layers.Dense(20)(layers.LSTM(8, return_sequences=True)(value)))


def penalized():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(9, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.03)),
            layers.Dense(9, activation="tanh", activity_regularizer=keras.regularizers.L1(0.02)),
            layers.Dense(9, activation="tanh", bias_regularizer=keras.regularizers.L1(0.05)),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L1(0.01)),
        ]
    )


def frozen():
    model = mlp()
    model.layers[1].trainable = False
    return model


def letters_there(targets):
    """Keras' losses are means over what is not masked."""
    return keras.ops.sum(keras.ops.cast(targets != 0, "float32"))


CASES: dict[str, tuple[Any, Any, Update]] = {
    "mlp": (mlp, images, Update()),
    "skips": (skips, images, Update()),
    "tied": (tied, letters, Update()),
    "transformer": (transformer, letters, Update(count=letters_there)),
    "penalized": (penalized, images, Update()),
    "frozen": (frozen, images, Update()),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_one_process_does(case):
    make, batches, update = CASES[case]
    batches = batches()
    alone = train(make, batches, update=update)
    assert difference(alone.before, alone.after) > 1e-3, "nothing was trained"
    for way in WAYS if case in ("mlp", "skips") else ("3 stages", "recomputed"):
        found = train(make, batches, update=update, **WAYS[way])
        assert difference(alone.before, found.before) == 0, way
        assert difference(alone.after, found.after) < CLOSE, way
        assert found.losses == pytest.approx(alone.losses, rel=1e-5), way
        assert found.means["loss"].value == pytest.approx(alone.means["loss"].value, rel=1e-5), way


@pytest.mark.parametrize("case", CASES)
def test_one_stage_computes_what_a_keras_adapter_does(case):
    from hvdtrain.adapters.keras import KerasAdapter

    make, batches, update = CASES[case]
    batches = batches()
    alone = train(make, batches, update=update)
    plain = KerasAdapter(make(), "adam", loss=sparse_loss(), update=update)
    plain.setup(LocalCommunicator(World()))
    from hvdtrain.adapters import keras_state

    variables = {
        name: variable for name, variable in keras_state.named(plain.model, plain.optimizer) if name.startswith("model/")
    }
    assert variables.keys() == {name for name in alone.before if name.startswith("model/")}
    for name, variable in variables.items():
        variable.assign(alone.before[name])
    losses = [plain.train_step(batch, lr=0.01, weight=1.0)["loss"].value for batch in batches]
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert (
        difference({name: variable.numpy() for name, variable in variables.items()}, {n: alone.after[n] for n in variables})
        < CLOSE
    )


def test_another_tensorflow_gives_the_same_gradients_by_its_tapes(monkeypatch):
    from hvdtrain.adapters import keras_recorded

    alone = train(tied, letters())
    monkeypatch.setattr(keras_recorded, "_halves", lambda *_: None)
    for way in ("3 stages", "recomputed"):
        assert difference(alone.after, train(tied, letters(), **WAYS[way]).after) < CLOSE, way


@pytest.mark.parametrize(
    "update",
    [Update(clip_norm=0.05), Update(clip_value=0.003), Update(micro_batch_size=2, postscale=0.5, prescale=3.0)],
    ids=["norm", "value", "micro-batches"],
)
def test_updates_are_those_of_one_process(update):
    alone = train(tied, letters(), update=update, optimizer="sgd", lr=1.0)
    assert difference(alone.after, train(tied, letters(), stages=3, update=update, optimizer="sgd", lr=1.0).after) < CLOSE


def test_a_mean_over_what_is_counted_is_that_of_the_whole_batch():
    def loss(targets, outputs):
        values = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
        mask = keras.ops.cast(targets != 0, "float32")
        return keras.ops.sum(values * mask) / keras.ops.sum(mask)

    batches = letters()
    batches[0][1][4:7] = 0  # a micro-batch whose loss is a mean over nothing
    options = {"loss": loss, "update": Update(count=letters_there), "optimizer": "sgd", "lr": 0.5}
    alone = train(transformer, batches, **options)
    found = train(transformer, batches, stages=2, micro_batches=11, **options)
    assert all(np.isfinite(found.losses))
    assert difference(alone.after, found.after) < CLOSE
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


def dropout():
    return keras.Sequential(
        [keras.Input((5,)), *[layer for _ in range(4) for layer in (layers.Dense(9), layers.Dropout(0.4))], layers.Dense(3)]
    )


def test_random_layers_draw_the_same_on_any_number_of_stages_and_again_in_the_backward_pass():
    alone = train(dropout, images(), micro_batches=8)
    other = train(dropout, images()[::-1], micro_batches=8)
    assert difference(alone.after, other.after) > 1e-3
    for way in ("3 stages", "recomputed", "interleaved"):
        found = train(dropout, images(), **WAYS[way] | {"micro_batches": 8})
        assert difference(alone.after, found.after) < CLOSE, way


def test_moving_statistics_are_gathered_once_also_where_activations_are_computed_again():
    def make():
        inner = [layer for _ in range(3) for layer in (layers.Dense(9), layers.BatchNormalization(), layers.ReLU())]
        return keras.Sequential([keras.Input((5,)), *inner, layers.Dense(3)])

    alone = train(make, images(), micro_batches=4)
    moved = [name for name in alone.after if "moving_mean" in name]
    assert len(moved) == 3
    assert all(np.abs(alone.after[name]).max() > 1e-4 for name in moved)
    for way in ("3 stages", "recomputed"):
        found = train(make, images(), **WAYS[way] | {"micro_batches": 4})
        assert difference(alone.after, found.after) < 3 * CLOSE, way


def test_batches_of_other_lengths_are_traced_once_more_at_most():
    batches = letters((7, 9, 4, 6), count=9)
    alone, found = train(tied, batches), train(tied, batches, stages=2, micro_batches=4)
    assert difference(alone.after, found.after) < CLOSE
    for made in found.adapters:
        for passes in made._part._passes:
            assert all(function.traced.traces <= 2 for function in passes._functions.values())


def test_half_precision_crosses_a_cut():
    update = Update(precision="bfloat16", count=letters_there)
    alone = train(transformer, letters(), update=update)
    found = train(transformer, letters(), stages=3, update=update)
    assert all(array.dtype == np.float32 for name, array in found.after.items() if "kernel" in name)
    assert found.losses == pytest.approx(alone.losses, rel=0.02)


def test_a_checkpoint_of_two_stages_is_read_by_three_and_by_one(tmp_path):
    def saved(comm):
        made = pipeline(tied)
        made.arrange(comm, Pipelining(stages=2), lambda mesh: None)
        made.setup(comm)
        made.sync()
        for step, batch in enumerate(batches[:2]):
            made.train_step(batch, lr=0.01, weight=1.0, seed=step)
        made.settle(saving=True)
        if comm.world.is_primary:
            made.snapshot()(tmp_path)
        for step, batch in enumerate(batches[2:]):
            made.train_step(batch, lr=0.01, weight=1.0, seed=step)
        return dict(made.tensors())

    batches = letters()
    wanted = {name: array for theirs in together(2, saved) for name, array in theirs.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.npz",
        "optimizer-00002-of-00002.npz",
    ]
    for stages in (1, 2, 3):
        assert difference(wanted, train(tied, batches[2:], stages=stages, load=tmp_path).after) < CLOSE


def other_width():
    return keras.Sequential([keras.Input((5,)), layers.Dense(8), *[layers.Dense(9) for _ in range(3)], layers.Dense(3)])


def deeper():
    return keras.Sequential([keras.Input((5,)), *[layers.Dense(9) for _ in range(6)], layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (other_width, "adam", r"its model/sequential/dense/bias has the shape \(9,\), the recipe's is float32 \(8,\)"),
        (deeper, "adam", "it has no model/sequential/dense/bias#6 and 1"),
        (mlp, "lion", "holds the state of the optimizer Adam, the recipe's is Lion"),
    ],
    ids=["shape", "layers", "optimizer"],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference(tmp_path, make, optimizer, message):
    train(mlp, images(batches=1)).adapters[0].snapshot()(tmp_path)
    with pytest.raises(ValueError, match=message):
        train(make, images(batches=1), optimizer=optimizer, load=tmp_path)


def test_only_the_layers_of_a_stage_take_memory_and_the_random_streams_go_on_as_before():
    from hvdtrain.adapters.keras_pipeline import KerasPipeline

    def work(comm):
        keras.utils.set_random_seed(3)
        made = KerasPipeline(mlp, "sgd", loss="mse")
        state = random.getstate(), np.random.get_state()[1].tolist()
        made.arrange(comm, Pipelining(stages=2, split="2,3"), lambda mesh: None)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state
        made.setup(comm)
        assert keras.StatelessScope().__enter__().__exit__() is None  # gives values to what has none, unless we say otherwise
        return [variable._value is not None for variable in made._part._graph.variables.values()]

    first, second = together(2, work)
    assert first == [True] * 4 + [False] * 6
    assert second == [False] * 4 + [True] * 6


def test_a_layer_that_is_computed_once_and_for_all_is_named(caplog):
    def make(positions):
        words = keras.Input((7,), dtype="int32")
        value = layers.Embedding(20, 8)(words) + layers.Embedding(7, 8, name="positions")(positions(words))
        return keras.Model(words, layers.Dense(20)(value))

    pipeline(lambda: make(lambda words: keras.ops.cumsum(keras.ops.ones_like(words), 1) - 1))
    assert not caplog.text
    pipeline(lambda: make(lambda words: keras.ops.arange(7)))
    assert "positions/embeddings is made with the model" in caplog.text
    assert "it is not trained" in caplog.text


def test_values_that_the_function_assigns_are_those_of_the_stages():
    def make():
        model = mlp()
        for layer in model.layers:
            layer.set_weights([np.full_like(weight, 0.25) for weight in layer.get_weights()])
        return model

    found = train(make, images(batches=1), stages=2)
    assert all((array == 0.25).all() for name, array in found.before.items() if name.startswith("model/"))


def test_a_model_that_is_made_already_keeps_its_values():
    keras.utils.set_random_seed(5)
    model = mlp()
    values = [variable.numpy() for variable in model.variables]

    def adapter(make, **more):
        return pipeline(model, **more)

    found = train(mlp, images(batches=1), adapter=adapter)
    mine = [array for name, array in found.before.items() if name.startswith("model/")]
    assert all(np.array_equal(value, array) for value, array in zip(values, mine, strict=True))


def test_layers_are_measured_one_by_one():
    adapter = pipeline(transformer)
    plain = adapter._part.costs(None, measured=False)
    found = adapter._part.costs(letters()[0], measured=True)
    assert [cost.name.rstrip("_0123456789") for cost in found if cost.parameters] == [
        "embedding", "multi_head_attention", "layer_normalization", "lstm", "dense",
    ]  # fmt: skip
    assert [cost.parameters for cost in found] == [cost.parameters for cost in plain]
    assert all(cost.seconds > 0 and cost.activations > 0 for cost in found)
    assert found[0].parameters == 20 * 8 * 4
    assert found[0].activations == 11 * 7 * 8 * 4
    assert all(variable._value is None for variable in adapter._part._graph.variables.values())
    assert difference(train(mlp, images()).after, train(mlp, images(), stages=2, split="time").after) < CLOSE


def test_metrics_that_keep_a_state_are_those_of_the_whole_validation_data():
    def work(comm):
        metric = keras.metrics.SparseCategoricalAccuracy()
        made = pipeline(mlp, metrics={"accuracy": metric, "again": keras.metrics.sparse_categorical_accuracy})
        made.arrange(comm, Pipelining(stages=comm.world.size), lambda mesh: None)
        made.setup(comm)
        made.sync()
        means = [made.eval_step(batch) for batch in images()]
        if means[0]["again"].count:
            assert sum(each["again"].total for each in means) / 52 == pytest.approx(metric.result().numpy())
        return made.eval_end()

    (alone,), (first, second) = together(1, work), together(2, work)
    assert alone == first == second


def test_a_gradient_that_is_not_finite_is_named_with_its_rank():
    def make():
        inputs = keras.Input((5,))
        value = layers.Dense(4, name="before")(inputs)
        value = keras.ops.sqrt(layers.Dense(3, name="root", kernel_initializer="zeros")(value))
        return keras.Model(inputs, layers.Dense(3, name="after")(value))

    with pytest.raises(
        HvdtrainError, match=r"the gradient of before/kernel and of \d more tensors is not finite on rank 0"
    ) as caught:
        train(make, images(batches=1), stages=2, split="1,3")
    assert "likewise on rank 1, where" not in str(caught.value)
    assert "likewise on rank 1" in str(caught.value)


class OfItsOwn(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, inputs):
        return self.inner(inputs)


def compiled():
    model = mlp()
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OfItsOwn, "OfItsOwn is a class of its own"),
        (lambda: keras.Sequential([layers.Dense(3)]), "is not built yet"),
        (compiled, "makes more than its layers"),
        (lambda: layers.Dense(3), "must make a keras.Model, it returned a Dense"),
        (3, "needs a keras.Model or a function that makes one, got a int"),
    ],
    ids=["class", "unbuilt", "compiled", "layer", "number"],
)
def test_what_is_no_graph_of_layers_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        pipeline(make)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), "stages cannot have global_clipnorm"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "stages cannot have a LossScaleOptimizer"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), "stages cannot have loss_scale_factor"),
    ],
    ids=["norm", "scale", "factor"],
)
def test_optimizers_that_look_at_all_gradients_are_refused(optimizer, message):
    with pytest.raises(UsageError, match=message):
        train(mlp, images(batches=1), optimizer=optimizer)


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "nadam", "adafactor", "muon", "ftrl"])
def test_optimizers_divide_their_state_among_stages(name):
    alone = train(mlp, images(), optimizer=name)
    assert difference(alone.after, train(mlp, images(), stages=3, optimizer=name).after) < 20 * CLOSE


def test_a_stage_without_variables_to_train_is_refused():
    def make():
        return keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.ReLU()])

    with pytest.raises(UsageError, match="the layers re_lu would be all of a stage"):
        train(make, images(batches=1), stages=2, split="1,1")


def test_synchronized_normalisation_is_refused():
    def make():
        return keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.BatchNormalization(synchronized=True)])

    with pytest.raises(UsageError, match="is synchronized, and micro-batches go through"):
        pipeline(make)
