"""What is particular to the PyTorch adapter."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain import checkpoint
from hvdtrain.comm.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.state import TrainState
from hvdtrain.world import World

torch = pytest.importorskip("torch")

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
    made.save(tmp_path)
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
        checkpoint.save(tmp_path, TrainState(step=1), {}, adapter(Model(3, 2)), COMM, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_loads_in_plain_pytorch_with_the_model_s_own_names(tmp_path):
    made = adapter()
    made.save(tmp_path)
    state = torch.load(tmp_path / "torch.pt", weights_only=True)["model"]
    torch.nn.Linear(3, 2).load_state_dict(state)
    assert list(state) == ["weight", "bias"]
