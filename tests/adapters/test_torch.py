"""What is particular to the PyTorch adapter."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import hvdtrain
from hvdtrain.checkpoint.files import Content
from hvdtrain.checkpoint.writer import write
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState
from hvdtrain.world import World
from tests.support import recipes

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

COMM = LocalCommunicator(World())
BATCH = (np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32))


def adapter(model=None, optimizer=None, **more):
    from hvdtrain.adapters.torch import TorchAdapter

    model = model or torch.nn.Linear(3, 2)
    made = TorchAdapter(
        model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), **{"loss": torch.nn.functional.mse_loss, **more}
    )
    made.setup(COMM)
    return made


def test_an_optimizer_that_needs_a_closure_is_refused_at_once():
    class NeedsClosure(torch.optim.SGD):
        def step(self, closure):
            raise NotImplementedError

    model = torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match="closure"):
        adapter(model, NeedsClosure(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="LBFGS"):
        adapter(model, torch.optim.LBFGS(model.parameters()))


def test_parameters_of_the_optimizer_alone_are_refused():
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match="2 parameters that are not the model's"):
        adapter(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(3)])
def test_a_metric_that_is_no_scalar_is_named(value):
    with pytest.raises(UsageError, match=r"the odd must be a scalar, got shape"):
        adapter(metrics={"odd": lambda output, target: value}).train_step(BATCH, lr=None, weight=1.0)


@pytest.mark.parametrize(
    "value", [1, 0.5, np.float64(0.5), torch.tensor(1), torch.tensor(True), torch.tensor(0.5, dtype=torch.bfloat16)]
)
def test_a_metric_may_be_any_kind_of_number(value):
    means = adapter(metrics={"figure": lambda output, target: value}).train_step(BATCH, lr=None, weight=1.0)
    assert means["figure"].value == float(value)


def test_a_loss_without_a_trainable_parameter_is_refused():
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable parameter"):
        adapter(model).train_step(BATCH, lr=None, weight=1.0)


def test_numpy_values_in_the_state_are_saved_and_read_back_safely(tmp_path):
    class Model(torch.nn.Linear):
        extra = np.arange(3)

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    model = Model(3, 2)
    made = adapter(model, torch.optim.SGD(model.parameters(), lr=np.float64(0.1)))
    made.snapshot()(tmp_path)
    model.extra = None
    made.load(tmp_path)
    assert model.extra.tolist() == [0, 1, 2]
    assert made.optimizer.param_groups[0]["lr"] == 0.1


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_first_saved(tmp_path):
    class Model(torch.nn.Linear):
        def get_extra_state(self):
            return World()

        def set_extra_state(self, state):
            pass

    with pytest.raises(HvdtrainError, match="holds more than tensors"):
        write(tmp_path, Content(TrainState(step=1), {}), adapter(Model(3, 2)).snapshot(), keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_loads_in_plain_pytorch_with_the_model_s_own_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Conv2d(2, 2, 3))
    model[1].weight = model[0].weight  # tied
    model[2].to(memory_format=torch.channels_last)
    adapter(model).snapshot()(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Conv2d(2, 2, 3))
    other.load_state_dict(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "state.pt").exists()


class Versioned(torch.nn.Linear):
    """Reads states of its first version otherwise, as layers of PyTorch do."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *more):
        self.read = local_metadata.get("version")
        super()._load_from_state_dict(state, prefix, local_metadata, *more)


def test_the_versions_of_a_model_s_modules_go_with_its_state(tmp_path):
    from hvdtrain.adapters import torch_files, torch_state

    model = torch.nn.Sequential(Versioned(3, 2))
    made = adapter(model)
    made.snapshot()(tmp_path)
    made.load(tmp_path)
    assert model[0].read == 2
    torch_files.export(tmp_path, tmp_path / "out.pt")
    for state in (torch.load(tmp_path / "out.pt", weights_only=True), torch_files.read_model(tmp_path)):
        model[0].read = None
        model.load_state_dict(state)
        assert model[0].read == 2
    # To other ranks: what ``broadcast`` sends, and what they make of it.
    sent = pickle.dumps(torch_state.map_leaves(made._state(), torch_state._Shape.of, torch.Tensor))
    room = torch_state.map_leaves(pickle.loads(sent), lambda shape: shape.empty(made.device), torch_state._Shape)
    model[0].read = None
    made._set_state(room)
    assert model[0].read == 2


def test_another_optimizer_does_not_take_over_the_state(tmp_path):
    model = torch.nn.Linear(3, 2)
    adapter(model, torch.optim.SGD(model.parameters(), 0.1)).snapshot()(tmp_path)
    other = adapter(model, torch.optim.AdamW(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="holds the state of the optimizer SGD, the recipe's is AdamW"):
        other.load(tmp_path)


def test_a_sparse_tensor_does_not_make_the_next_ones_move():
    from hvdtrain.adapters.torch_files import HostCopy

    copy, state = HostCopy(), {"sparse": torch.eye(3).to_sparse(), "a": torch.ones(2), "b": torch.ones(3)}
    first, second = copy.take(state), copy.take(state)
    assert [second[name].data_ptr() for name in "ab"] == [first[name].data_ptr() for name in "ab"]


def test_tensors_that_safetensors_cannot_hold_are_saved_too(tmp_path):
    model = torch.nn.Linear(3, 2)
    model.register_buffer("phases", torch.tensor([1 + 2j, 3j]))
    model.register_buffer("links", torch.eye(3).to_sparse())
    made = adapter(model)
    made.snapshot()(tmp_path)
    with torch.no_grad():
        model.phases.zero_()
        model.links.zero_()
    made.load(tmp_path)
    assert model.phases.tolist() == [1 + 2j, 3j]
    assert torch.equal(model.links.to_dense(), torch.eye(3))


def test_a_copy_is_of_its_moment(tmp_path):
    model = mlp()
    made = adapter(model, loss=torch.nn.functional.cross_entropy)
    made.train_step(DATA, lr=None, weight=1.0)
    before, write = model[0].weight.detach().clone(), made.snapshot()
    made.train_step(DATA, lr=None, weight=1.0)
    write(tmp_path)
    assert not torch.equal(model[0].weight, before)
    made.load(tmp_path)
    assert torch.equal(model[0].weight, before)


def test_the_optimizer_goes_on_as_it_was_but_with_what_the_recipe_has_changed_since(tmp_path, caplog):
    def made(lr: float, decay: float):
        torch.manual_seed(0)
        model = mlp()
        return adapter(model, torch.optim.AdamW(model.parameters(), lr, weight_decay=decay))

    first = made(0.1, 0.01)
    first.optimizer.param_groups[0].update(lr=0.05, weight_decay=0.02)  # as a scheduler does on the way
    first.snapshot()(tmp_path)
    same, other = made(0.1, 0.01), made(0.3, 0.01)
    same.load(tmp_path)
    assert (same.optimizer.param_groups[0]["lr"], same.optimizer.param_groups[0]["weight_decay"]) == (0.05, 0.02)
    assert not caplog.text
    other.load(tmp_path)
    assert (other.optimizer.param_groups[0]["lr"], other.optimizer.param_groups[0]["weight_decay"]) == (0.3, 0.02)
    assert "the optimizer goes on as the recipe says now: lr 0.3 instead of 0.1" in caplog.text


DATA = recipes.arrays(40, 3)


def mlp(seed=0, *, norm=False):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(recipes.FEATURES, 9), *([torch.nn.BatchNorm1d(9)] if norm else []), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(9, recipes.CLASSES))


def by_hand(model, step, *, parts=(slice(0, 40),)):
    """Five steps as the PyTorch documentation writes them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (torch.as_tensor(array) for array in DATA)
    for _ in range(5):
        optimizer.zero_grad()
        for part in parts:
            loss = torch.nn.functional.cross_entropy(model(inputs[part]), targets[part])
            (loss * len(inputs[part]) / 40).backward()
        step(model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("update", "step", "parts"),
    [
        ({}, lambda model: None, (slice(0, 40),)),
        ({"micro_batch_size": 15}, lambda model: None, (slice(0, 15), slice(15, 30), slice(30, 40))),
        ({"clip_norm": 0.05}, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05), (slice(0, 40),)),
        ({"clip_value": 0.01}, lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01), (slice(0, 40),)),
        (
            {"prescale": 0.5, "count": len},
            lambda model: [parameter.grad.mul_(0.5) for parameter in model.parameters()],
            (slice(0, 40),),
        ),
        ({"postscale": 0.5}, lambda model: [parameter.grad.mul_(0.5) for parameter in model.parameters()], (slice(0, 40),)),
    ],
)
def test_an_update_is_what_pytorch_s_own_documentation_writes(update, step, parts):
    expected = by_hand(mlp(), step, parts=parts)
    model = mlp()
    made = adapter(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=torch.nn.functional.cross_entropy,
        update=hvdtrain.Update(**update),
    )
    for _ in range(5):
        made.train_step(DATA, lr=None, weight=1.0)
    for mine, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), wanted, rtol=1e-5, atol=1e-7)


def test_a_mean_over_what_is_counted_is_that_of_one_large_batch_in_any_pieces():
    weights = torch.tensor([0.0, 3.0, 1.0, 0.5, 2.0])
    losses = {"loss": torch.nn.CrossEntropyLoss(weight=weights)}
    results = []
    for size in (None, 7):
        model = mlp()
        update = hvdtrain.Update(count=lambda target: weights[target].sum(), micro_batch_size=size)
        made = adapter(model, torch.optim.SGD(model.parameters(), lr=0.1), update=update, **losses)
        means = [made.train_step(DATA, lr=None, weight=1.0)["loss"] for _ in range(3)]
        assert means[0].count == pytest.approx(float(weights[torch.as_tensor(DATA[1])].sum()))
        results.append([*model.parameters(), torch.tensor([mean.value for mean in means])])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


def test_a_batch_of_which_nothing_counts_changes_nothing():
    model = mlp()
    made = adapter(
        model,
        loss=lambda output, target: torch.nn.functional.cross_entropy(output, target, ignore_index=0),
        update=hvdtrain.Update(count=lambda target: (target != 0).sum()),
    )
    before = [parameter.clone() for parameter in model.parameters()]
    made.train_step((DATA[0], np.zeros(40, np.int64)), lr=None, weight=1.0)  # the loss of no target is NaN
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_float16_leaves_out_updates_that_overflow_and_keeps_its_scale_in_checkpoints(tmp_path):
    model = mlp()
    made = adapter(
        model,
        loss=lambda output, target: 60 * torch.nn.functional.cross_entropy(output, target),
        update=hvdtrain.Update(precision="float16"),
    )
    before = model[0].weight.clone()
    made.train_step(DATA, lr=None, weight=1.0)
    assert torch.equal(before, model[0].weight)
    for _ in range(6):
        made.train_step(DATA, lr=None, weight=1.0)
    assert not torch.equal(before, model[0].weight)
    scale = made._scaler.get_scale()
    assert scale < 65536
    made.snapshot()(tmp_path)
    other = adapter(mlp(), update=hvdtrain.Update(precision="float16"))
    other.load(tmp_path)
    assert other._scaler.get_scale() == scale


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gradient_that_is_not_finite_is_named_and_not_applied(precision):
    model = mlp()
    made = adapter(model, loss=torch.nn.functional.cross_entropy, update=hvdtrain.Update(precision=precision))
    made.train_step(DATA, lr=None, weight=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    spoiled = (DATA[0].copy(), DATA[1])
    spoiled[0][7] = np.nan

    def train() -> None:
        for _ in range(40):  # float16 first lowers its scale
            made.train_step(spoiled, lr=None, weight=1.0)

    with pytest.raises(
        HvdtrainError, match=r"the gradient of 0\.weight and of 3 more tensors is not finite on rank 0"
    ) as caught:
        train()
    assert caught.value.on_all_ranks
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_random_layers_follow_the_seed_of_the_step():
    def after(*seeds):
        model = mlp()
        model.insert(1, torch.nn.Dropout(0.5))
        made = adapter(model, loss=torch.nn.functional.cross_entropy)
        for seed in seeds:
            made.train_step(DATA, lr=None, weight=1.0, seed=seed)
        return model[0].weight.detach()

    assert torch.equal(after(5, 6), after(5, 6))
    assert not torch.equal(after(5, 6), after(5, 7))


def test_metric_objects_are_evaluated_over_all_batches_and_begin_anew():
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.classification.MulticlassAccuracy(recipes.CLASSES, average="micro")
    made = adapter(mlp(), loss=torch.nn.functional.cross_entropy, metrics={"accuracy": accuracy})
    assert "accuracy" not in made.train_step(DATA, lr=None, weight=1.0)
    outputs = made.model(torch.as_tensor(DATA[0])).argmax(1)
    for _ in range(2):
        for part in (slice(0, 7), slice(7, 40), slice(40, 40)):
            made.eval_step((DATA[0][part], DATA[1][part]))
        assert made.eval_end()["accuracy"] == pytest.approx(float((outputs == torch.as_tensor(DATA[1])).float().mean()))


def test_a_figure_may_bring_a_count_of_its_own():
    def hits(output, target):
        return hvdtrain.Mean((output.argmax(1) == target)[target == 1].sum(), int((target == 1).sum()))

    made = adapter(mlp(), loss=torch.nn.functional.cross_entropy, metrics={"recall": hits})
    assert made.eval_step(DATA)["recall"].count == int((DATA[1] == 1).sum())


def test_names_of_everything_that_must_agree():
    model = mlp()
    made = adapter(model, torch.optim.Adam(model.parameters()), loss=torch.nn.functional.cross_entropy)
    assert [name for name, _ in made.tensors()] == ["model/0.weight", "model/0.bias", "model/2.weight", "model/2.bias"]
    made.train_step(DATA, lr=None, weight=1.0)
    assert "optimizer/0.weight/exp_avg" in dict(made.tensors())
