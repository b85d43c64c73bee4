"""What every adapter promises, whatever its framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.adapters import Adapter
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import UsageError
from hvdtrain.world import World
from tests.support import pipelines, recipes

FRAMEWORKS = ["linear", "torch", "keras"]
#: adapters of models that can be split, on one process
SPLIT = {"torch_pipeline": "torch", "keras_pipeline": "keras"}


@pytest.fixture(params=[*FRAMEWORKS, *SPLIT])
def make(request: pytest.FixtureRequest) -> Callable[[], Adapter]:
    framework = SPLIT.get(request.param, request.param)
    if framework != "linear":
        pytest.importorskip(framework, reason=f"{framework} is not installed")

    def adapter() -> Adapter:
        made = getattr(pipelines if request.param in SPLIT else recipes, framework)().adapter
        made.setup(LocalCommunicator(World()))
        made.sync()
        return made

    return adapter


def batch(count: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return recipes.arrays(count, seed)


def losses(adapter: Adapter, steps: int = 3, lr: float | None = None) -> list[float]:
    return [adapter.train_step(batch(16, step), lr=lr, weight=1.0)["loss"].value for step in range(steps)]


def saved_files(adapter: Adapter, path: Path) -> list[Path]:
    path.mkdir()
    adapter.snapshot()(path)
    return sorted(path.iterdir())


def test_it_satisfies_the_protocol(make):
    assert isinstance(make(), Adapter)


def test_training_steps_lower_the_loss_of_a_batch(make):
    adapter = make()
    results = [adapter.train_step(batch(32), lr=0.05, weight=1.0)["loss"].value for _ in range(20)]
    assert results[-1] < results[0]


def test_means_have_the_same_names_for_a_full_and_an_empty_batch(make):
    adapter = make()
    full = adapter.train_step(batch(5), lr=None, weight=1.0)
    empty = adapter.train_step(batch(0), lr=None, weight=0.0)
    assert full.keys() == empty.keys() == adapter.eval_step(batch(3)).keys() == adapter.eval_step(batch(0)).keys()
    assert {mean.count for mean in full.values()} == {5}
    assert {float(mean.total) for mean in empty.values()} == {0.0}
    assert {mean.count for mean in empty.values()} == {0}


def test_an_empty_batch_changes_what_a_zero_gradient_changes_and_makes_nothing_nan(make):
    adapter = make()
    for _ in range(2):
        adapter.train_step(batch(0), lr=None, weight=0.0)
    assert np.isfinite(adapter.eval_step(batch(8))["loss"].value)


def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts(make):
    adapter = make()
    inputs, targets = batch(21)
    whole = adapter.eval_step((inputs, targets))
    parts = [adapter.eval_step((inputs[:8], targets[:8])), adapter.eval_step((inputs[8:], targets[8:]))]
    for name, mean in whole.items():
        assert (parts[0][name] + parts[1][name]).value == pytest.approx(mean.value, rel=1e-5)


def test_evaluating_changes_nothing(make):
    first, second = make(), make()
    first.eval_step(batch(8))
    assert losses(first) == losses(second)


def test_the_learning_rate_given_is_the_one_used(make):
    still, moving = make(), make()
    assert losses(still, 1, lr=0.0) == losses(moving, 1, lr=0.05)
    before = still.eval_step(batch(8))["loss"].value
    assert before != moving.eval_step(batch(8))["loss"].value
    losses(still, 2, lr=0.0)
    assert still.eval_step(batch(8))["loss"].value == pytest.approx(before, rel=1e-6)


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(make, tmp_path):
    original, copy = make(), make()
    losses(original, 4)  # gives the optimizer a state, which must come along
    assert saved_files(original, tmp_path / "model")
    losses(copy, 1)
    copy.load(tmp_path / "model")
    assert losses(copy) == losses(original)


def test_a_loss_that_sums_over_the_samples_is_refused():
    torch, keras = pytest.importorskip("torch"), pytest.importorskip("keras")
    from hvdtrain.adapters.keras import KerasAdapter
    from hvdtrain.adapters.torch import TorchAdapter

    model = torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match="sums over the samples"):
        TorchAdapter(model, torch.optim.SGD(model.parameters(), 0.1), loss=torch.nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(UsageError, match="sums over the samples"):
        KerasAdapter(
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
            "sgd",
            loss=keras.losses.MeanSquaredError(reduction="sum"),
        )


def test_a_keras_loss_is_the_same_as_an_object_a_function_and_a_name():
    keras = pytest.importorskip("keras")
    from hvdtrain.adapters.keras import KerasAdapter

    def after_a_step(loss) -> np.ndarray:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((recipes.FEATURES,)), keras.layers.Dense(recipes.CLASSES, activation="softmax")])
        adapter = KerasAdapter(model, keras.optimizers.SGD(0.1), loss=loss)
        adapter.setup(LocalCommunicator(World()))
        adapter.train_step(batch(16), lr=None, weight=1.0)
        return model.trainable_variables[0].numpy()

    whole = after_a_step(keras.losses.SparseCategoricalCrossentropy())
    for loss in (keras.losses.sparse_categorical_crossentropy, "sparse_categorical_crossentropy"):
        assert np.allclose(after_a_step(loss), whole, rtol=1e-6)


def test_parameters_that_only_the_optimizer_knows_are_refused():
    torch = pytest.importorskip("torch")
    from hvdtrain.adapters.torch import TorchAdapter

    model, margin = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match="updates 1 parameters that are not the model's"):
        TorchAdapter(model, torch.optim.SGD([*model.parameters(), margin], 0.1), loss=torch.nn.functional.cross_entropy)


def test_a_batch_that_is_no_pair_is_refused(make):
    with pytest.raises(UsageError, match=r"\(inputs, targets\)"):
        make().train_step((*batch(4), 1), lr=None, weight=1.0)


def test_set_up_again_it_goes_on_as_if_nothing_had_happened(make):
    moved, still = make(), make()
    assert losses(moved) == losses(still)
    moved.setup(LocalCommunicator(World(elastic=True)))
    assert losses(moved) == losses(still)


def test_what_an_interrupted_step_has_changed_is_taken_back():
    """The forward pass moves the statistics of batch normalisation before the ranks meet; here the loss fails after it."""
    torch, keras, tf = pytest.importorskip("torch"), pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    from hvdtrain.adapters.keras import KerasAdapter
    from hvdtrain.adapters.torch import TorchAdapter

    def torch_loss(output, target):
        assert target.min() >= 0
        return torch.nn.functional.cross_entropy(output, target)

    def keras_loss(targets, outputs):
        with tf.control_dependencies([tf.debugging.assert_non_negative(targets)]):
            return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)

    layers = torch.nn.Sequential(
        torch.nn.Linear(recipes.FEATURES, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, recipes.CLASSES)
    )
    net = keras.Sequential(
        [keras.Input((recipes.FEATURES,)), keras.layers.BatchNormalization(), keras.layers.Dense(recipes.CLASSES)]
    )
    for adapter in (
        TorchAdapter(layers, torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9), loss=torch_loss),
        KerasAdapter(net, keras.optimizers.SGD(0.1, momentum=0.9), loss=keras_loss),
    ):
        adapter.setup(LocalCommunicator(World(elastic=True)))
        adapter.train_step(batch(16), lr=None, weight=1.0)
        before = {name: array.copy() for name, array in adapter.tensors()}
        inputs, targets = batch(16, 4)
        with pytest.raises((AssertionError, tf.errors.InvalidArgumentError)):
            adapter.train_step((inputs, targets - 100), lr=None, weight=1.0)
        for name, array in adapter.tensors():
            assert np.array_equal(array, before[name]), name
