"""What is particular to the Keras adapter."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.update import Update
from hvdtrain.world import World

keras = pytest.importorskip("keras")


def test_batches_of_other_lengths_trace_the_step_once_more_at_most():
    from hvdtrain.adapters.keras import KerasAdapter

    traces = []

    class Watched(keras.layers.Layer):
        def call(self, inputs):
            traces.append(inputs.shape)
            return inputs

    words = keras.Input((None,))
    vectors = Watched()(keras.layers.Embedding(50, 8)(words))
    model = keras.Model(words, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(vectors)))
    adapter = KerasAdapter(model, "sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    adapter.setup(LocalCommunicator(World()))
    traces.clear()
    for count, length in [(4, 7), (3, 7), (0, 7), (4, 9), (2, 11), (1, 7)]:
        means = adapter.train_step((np.ones((count, length), np.int32), np.ones(count, np.int64)), lr=None, weight=count / 4)
        assert means["loss"].count == count
    assert len(traces) == 2


def adapter(optimizer="sgd", **more):
    from hvdtrain.adapters.keras import KerasAdapter

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made = KerasAdapter(model, optimizer, **{"loss": "mse", **more})
    made.setup(LocalCommunicator(World()))
    return made


def test_an_optimizer_that_scales_the_loss_trains_as_one_that_does_not():
    batch = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    optimizers = [
        keras.optimizers.SGD(0.1),
        keras.optimizers.SGD(0.1, loss_scale_factor=1024.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
    ]
    losses = []
    for optimizer in optimizers:
        made = adapter(optimizer)
        made.train_step(batch, lr=None, weight=1.0)
        losses.append(made.train_step(batch, lr=None, weight=1.0)["loss"].value)
    assert losses == pytest.approx([losses[0]] * 3)


METRIC_HINT = "keras.metrics.sparse_categorical_accuracy"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"acc": "accuracy"}, "'acc' must be a function"),
        (["accuracy"], "metrics must be a dict of functions or keras.metrics objects, got a list"),
    ],
    ids=["name", "list"],
)
def test_metrics_that_would_be_wrong_are_refused(metrics, message):
    with pytest.raises(UsageError, match=message) as caught:
        adapter(metrics=metrics)
    assert METRIC_HINT in caught.value.hint


def test_a_saved_model_loads_in_plain_keras(tmp_path):
    made = adapter()
    made.snapshot()(tmp_path)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    other.load_weights(tmp_path / "model.weights.h5")
    for mine, theirs in zip(made.model.variables, other.variables, strict=True):
        assert np.array_equal(mine.value.numpy(), theirs.value.numpy())


def test_a_copy_is_of_its_moment_and_is_written_in_another_thread(tmp_path):
    made, batch = nets()
    made.train_step(batch, lr=None, weight=1.0)
    before = [variable.value.numpy() for variable in [*made.model.variables, *made.optimizer.variables]]
    write = made.snapshot()
    thread = threading.Thread(target=write, args=(tmp_path,))
    thread.start()
    while thread.is_alive():
        made.train_step(batch, lr=None, weight=1.0)
    made.load(tmp_path)
    seeds = {id(variable) for generator in made._generators for variable in [generator.state]}  # each step sets them
    for variable, value in zip([*made.model.variables, *made.optimizer.variables], before, strict=True):
        assert id(variable) in seeds or np.array_equal(variable.value.numpy(), value), variable.path


def test_the_optimizer_goes_on_with_its_learning_rate_unless_the_recipe_has_changed_it_since(tmp_path, caplog):
    from hvdtrain.adapters.keras import KerasAdapter

    def made(lr: float, dtype: str = "float32"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])
        return KerasAdapter(model, keras.optimizers.SGD(lr, momentum=0.9), loss="mse")

    first = made(0.1)
    first.optimizer.learning_rate = 0.05
    first.snapshot()(tmp_path)
    same, other = made(0.1), made(0.3)
    same.load(tmp_path)
    assert float(same.optimizer.learning_rate) == pytest.approx(0.05)
    assert not caplog.text
    other.load(tmp_path)
    assert float(other.optimizer.learning_rate) == pytest.approx(0.3)
    assert "the optimizer goes on as the recipe says now: lr 0.3 instead of 0.1" in caplog.text


def test_another_optimizer_does_not_take_over_the_state(tmp_path):
    from hvdtrain.adapters.keras import KerasAdapter

    def made(optimizer, dtype: str = "float32"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])
        return KerasAdapter(model, optimizer, loss="mse")

    made(keras.optimizers.SGD(momentum=0.9)).snapshot()(tmp_path)
    with pytest.raises(ValueError, match="holds the state of the optimizer SGD, the recipe's is Lion"):
        made(keras.optimizers.Lion()).load(tmp_path)
    with pytest.raises(ValueError, match=r"was saved as float32, the recipe's is bfloat16"):
        made(keras.optimizers.SGD(momentum=0.9), "bfloat16").load(tmp_path)


def test_an_optimizer_state_in_bfloat16_is_saved_and_loaded(tmp_path):
    from hvdtrain.adapters.keras import KerasAdapter

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    made = KerasAdapter(model, keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    made.optimizer.variables[-1].assign([0.5, 1.5])
    made.snapshot()(tmp_path)
    made.optimizer.variables[-1].assign([0.0, 0.0])
    made.load(tmp_path)
    assert made.optimizer.variables[-1].numpy().tolist() == [0.5, 1.5]


def nets(**update):
    """An adapter on a network with dropout and batch normalisation, and a batch for it."""
    from hvdtrain.adapters.keras import KerasAdapter

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    made = KerasAdapter(model, keras.optimizers.SGD(0.1), loss="mse", update=Update(**update))
    made.setup(LocalCommunicator(World()))
    return made, (np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.ones((6, 2), np.float32))


def tf_constant(tensor):
    """What a tensor of a graph is, if that is known."""
    import tensorflow as tf

    return tf.get_static_value(tensor)


def weights_of(made):
    return [variable.value.numpy() for variable in made.model.trainable_variables]


def test_the_same_seed_draws_the_same_and_another_one_something_else():
    results = []
    for seeds in ([1, 2], [1, 2], [1, 3]):
        made, batch = nets()
        for seed in seeds:
            made.train_step(batch, lr=None, weight=1.0, seed=seed)
        results.append(weights_of(made)[0])
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    first, second = (layer.seed_generator.state.numpy() for layer in made.model.layers if hasattr(layer, "seed_generator"))
    assert first.tolist() != second.tolist(), "two layers with one stream"


def test_seeds_and_steps_do_not_trace_anew():
    made, batch = nets()
    for seed in range(4):
        made.train_step(batch, lr=0.1 / (seed + 1), weight=1.0, seed=seed)
    (plan,) = made._plans.values()
    assert plan.steps[True, True].traces == 1


def test_figures_are_read_with_the_step():
    made, batch = nets()
    assert type(made.train_step(batch, lr=None, weight=1.0)["loss"].total) is float


def test_a_step_with_samples_asks_for_nothing_but_whether_gradients_are_finite():
    made, batch = nets()
    made.train_step(batch, lr=None, weight=1.0)
    (plan,) = made._plans.values()
    graph = plan.steps[False, True]._direct._concrete.graph
    assert [operation.type for operation in graph.get_operations() if operation.type in ("If", "StatelessIf")] == ["If"]


def test_a_rank_without_samples_reduces_no_constants():
    """TensorFlow would compute the reduction of constants when it looks at the graph: on this rank alone."""
    made, (inputs, targets) = nets()
    made.train_step((inputs, targets), lr=None, weight=1.0)
    before = weights_of(made)
    made.train_step((inputs[:0], targets[:0]), lr=None, weight=0.0)
    assert all(np.array_equal(new, old) for new, old in zip(weights_of(made), before, strict=True))
    (plan,) = made._plans.values()
    fills = [each for each in plan.steps[False, False]._direct._concrete.graph.get_operations() if each.type == "Fill"]
    assert len(fills) == len(plan.variables)
    assert all(tf_constant(each.inputs[1]) is None for each in fills)


def test_random_streams_are_no_part_of_what_ranks_must_share():
    made, _ = nets()
    assert not [name for name, _ in made.tensors() if "seed" in name]
    assert len({name for name, _ in made.tensors()}) == len(list(made.tensors()))


@pytest.mark.parametrize(("precision", "policy"), [("bfloat16", "mixed_bfloat16"), ("float16", "mixed_float16")])
def test_precision_sets_the_policy_and_keeps_the_weights_in_float32(precision, policy):
    made, batch = nets(precision=precision)
    assert {layer.dtype_policy.name for layer in made.model.layers} == {policy}
    made.train_step(batch, lr=None, weight=1.0)
    assert {variable.dtype for variable in made.model.trainable_variables} == {"float32"}
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer) == (precision == "float16")


def test_a_gradient_that_is_not_finite_is_not_applied_and_named():
    made, (inputs, targets) = nets()
    before = weights_of(made)
    targets[2] = np.nan
    with pytest.raises(
        HvdtrainError, match=r"kernel and of 5 more tensors is not finite on rank 0 .*, where the loss is nan"
    ) as caught:
        made.train_step((inputs, targets), lr=None, weight=1.0)
    assert caught.value.on_all_ranks
    assert all(np.array_equal(new, old) for new, old in zip(weights_of(made), before, strict=True))


def test_float16_gives_up_when_no_scale_helps():
    made, (inputs, targets) = nets(precision="float16")
    made.optimizer.dynamic_scale.assign(2.0)
    made.train_step((inputs, targets * np.nan), lr=None, weight=1.0)
    with pytest.raises(HvdtrainError, match="is not finite"):
        made.train_step((inputs, targets * np.nan), lr=None, weight=1.0)


def test_a_clipped_infinity_is_not_taken_for_a_gradient():
    made, (inputs, targets) = nets(clip_value=0.1)
    with pytest.raises(HvdtrainError, match="is not finite"):
        made.train_step((inputs, targets * np.inf), lr=None, weight=1.0)


def test_samples_that_count_for_nothing_do_nothing_be_their_loss_nan():
    made, (inputs, targets) = nets(count=lambda targets: keras.ops.sum(targets[:, 0]), micro_batch_size=2)
    other, _ = nets(count=lambda targets: keras.ops.sum(targets[:, 0]))
    for one in (made, other):
        keep = [layer for layer in one.model.layers if "dense" not in layer.name]
        for layer in keep:
            layer.trainable = False  # normalisation and dropout see the parts of a batch
        one._loss = lambda targets, outputs: keras.ops.sum(targets * outputs**2) / keras.ops.sum(targets[:, 0])
    targets[2:4] = 0.0
    for one in (made, other):
        for layer in one.model.layers:
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
    mean = made.train_step((inputs, targets), lr=None, weight=1.0)["loss"]
    assert mean.value == pytest.approx(other.train_step((inputs, targets), lr=None, weight=1.0)["loss"].value)
    for mine, whole in zip(weights_of(made), weights_of(other), strict=True):
        assert np.allclose(mine, whole, rtol=1e-5)


def test_layers_are_frozen_and_unfrozen_between_steps():
    made, batch = nets()
    dense = made.model.layers[0]
    before = dense.kernel.numpy()
    dense.trainable = False
    made.train_step(batch, lr=None, weight=1.0)
    assert np.array_equal(dense.kernel.numpy(), before)
    dense.trainable = True
    made.train_step(batch, lr=None, weight=1.0)
    assert not np.array_equal(dense.kernel.numpy(), before)


def test_a_layer_that_the_optimizer_never_knew_is_refused():
    from hvdtrain.adapters.keras import KerasAdapter

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, trainable=False), keras.layers.Dense(2)])
    made = KerasAdapter(model, "sgd", loss="mse")
    made.setup(LocalCommunicator(World()))
    model.layers[0].trainable = True
    with pytest.raises(UsageError, match="was frozen when the optimizer was made"):
        made.train_step((np.ones((2, 3)), np.ones((2, 2))), lr=None, weight=1.0)


def test_micro_batches_and_synchronised_layers_exclude_each_other():
    from hvdtrain.adapters.keras import KerasAdapter

    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(2)])
    with pytest.raises(UsageError, match="is synchronized and micro_batch_size is set"):
        KerasAdapter(model, "sgd", loss="mse", update=Update(micro_batch_size=2))


def test_metric_objects_see_each_validation_sample_once_and_begin_anew():
    from hvdtrain.adapters.keras import KerasAdapter

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="sigmoid")])
    metrics = {"auc": keras.metrics.AUC(), "error": keras.metrics.mean_absolute_error, "f1": keras.metrics.F1Score()}
    made = KerasAdapter(model, "sgd", loss="mse", metrics=metrics)
    made.setup(LocalCommunicator(World()))
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(20, 3)).astype(np.float32), np.eye(2, dtype=np.float32)[random.integers(0, 2, 20)]
    made.train_step((inputs, targets), lr=None, weight=1.0)
    whole = keras.metrics.AUC()
    whole.update_state(targets, model(inputs))
    for _ in range(2):
        for part in (slice(0, 13), slice(13, 20)):
            assert made.eval_step((inputs[part], targets[part])).keys() == {"loss", "error"}
        values = made.eval_end()
        assert values.keys() == {"auc", "f1/0", "f1/1"}
        assert values["auc"] == pytest.approx(float(whole.result()))


def test_what_a_model_keeps_of_a_batch_is_not_the_next_one():
    from hvdtrain.adapters.keras import KerasAdapter

    class Keeps(keras.layers.Layer):
        def build(self, shape):
            self.last = self.add_weight(shape=(4, 3), trainable=False)

        def call(self, inputs):
            self.last.assign(inputs)
            return inputs

    keeps = Keeps()
    model = keras.Sequential([keras.Input((3,), batch_size=4), keeps, keras.layers.Dense(2)])
    made = KerasAdapter(model, "sgd", loss="mse")
    made.setup(LocalCommunicator(World()))
    for number in range(3):
        made.train_step((np.full((4, 3), number, np.float32), np.zeros((4, 2), np.float32)), lr=None, weight=1.0)
        assert float(np.max(keeps.last)) == number
    made._batches.tensors((np.full((4, 3), 9, np.float32), np.zeros((4, 2), np.float32)))
    assert float(np.max(keeps.last)) == 2.0


def test_a_tensorflow_without_the_short_way_takes_its_own(monkeypatch):
    from hvdtrain.adapters import keras_traced

    batch = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    losses = []
    for has_it in (True, False):
        if not has_it:
            monkeypatch.setattr(keras_traced, "execute", None)
        made = adapter()
        losses.append([made.train_step(batch, lr=None, weight=1.0)["loss"].value for _ in range(3)])
        assert made.eval_step(batch)["loss"].count == 4
    assert losses[0] == losses[1]
