"""What people have as data, and the batches that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvdtrain.data.sources import ArraySource, ItemSource, Source, as_source
from hvdtrain.errors import UsageError

X = np.arange(12).reshape(6, 2)
Y = np.arange(6) * 10
SOME, NONE = np.array([4, 0]), np.array([], dtype=np.int64)


class Items:
    """A data set with [index] and len(), like those of PyTorch; it counts what is loaded."""

    def __init__(self, make: Callable[[int], Any], length: int = 6) -> None:
        self.make, self.length, self.loaded = make, length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        self.loaded += 1
        return self.make(index)


class Pair(NamedTuple):
    x: Any
    y: Any


class ArrayLike:
    """An array of another library, whose ``take`` flattens, as those of NumPy and PyTorch do."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return X

    def __len__(self) -> int:
        return 6

    def take(self, indices: Any) -> Any:
        return X.take(indices)


def _equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            _equal(found[name], expected[name])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _equal(one, other)
    else:
        assert (found.tolist(), found.shape, found.dtype) == (expected.tolist(), expected.shape, expected.dtype)


FORMS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a pair of arrays": ((X, Y), lambda i: (X[i], Y[i])),
    "one array": (X, lambda i: X[i]),
    "a dict": ({"x": X, "y": Y}, lambda i: {"x": X[i], "y": Y[i]}),
    "several inputs": (((X, {"z": Y}), Y), lambda i: ((X[i], {"z": Y[i]}), Y[i])),
    "lists of numbers in a pair": ((X.tolist(), Y.tolist()), lambda i: (X[i], Y[i])),
    "an array of another library": (ArrayLike(), lambda i: X[i]),
    "items that are pairs": (Items(lambda i: (X[i], Y[i])), lambda i: (X[i], Y[i])),
    "items that are lists": (Items(lambda i: [X[i], int(Y[i])]), lambda i: (X[i], Y[i])),
    "items that are named tuples": (Items(lambda i: Pair(X[i], Y[i])), lambda i: (X[i], Y[i])),
    "items that are dicts": (Items(lambda i: {"x": X[i], "y": {"z": Y[i]}}), lambda i: {"x": X[i], "y": {"z": Y[i]}}),
    "items that are numbers": (Items(lambda i: i * 10), lambda i: Y[i]),
    "a range": (range(0, 60, 10), lambda i: Y[i]),
    "samples": (ItemSource([(X[i], Y[i]) for i in range(6)]), lambda i: (X[i], Y[i])),
}


@pytest.mark.parametrize("indices", [SOME, NONE], ids=["some", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_has_the_samples_in_the_form_of_the_data(form: str, indices: np.ndarray) -> None:
    data, expected = FORMS[form]
    source = as_source(data)
    assert isinstance(source, Source)
    assert len(source) == 6
    _equal(source.take(indices), expected(indices))


def test_a_batch_is_a_copy() -> None:
    data = X.copy()
    batch = ArraySource((data,)).take(np.arange(6))
    batch[0][:] = -1
    assert np.array_equal(data, X)


def test_only_the_samples_of_a_batch_are_loaded() -> None:
    items = Items(lambda i: (X[i], Y[i]))
    as_source(items).take(SOME)
    assert items.loaded == 2


class OwnSource:
    def __len__(self) -> int:
        return 3

    def take(self, indices: Any) -> Any:
        return (indices * 2, indices)


class FirstFew(Items):
    """The data sets of Hugging Face and tf.data have a ``take`` too: the first n samples."""

    def take(self, n: int) -> Any:
        raise AssertionError("this is another take")


def test_a_source_is_used_as_it_is() -> None:
    source = OwnSource()
    assert as_source(source) is source


def test_a_take_of_another_meaning_is_not_called() -> None:
    _equal(as_source(FirstFew(lambda i: (X[i], Y[i]))).take(SOME), (X[SOME], Y[SOME]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no data source can be made of a builtins.NoneType"),
        (5, "no data source can be made of a builtins.int"),
        ("data/train", "no data source can be made of a builtins.str"),
        (iter([1]), "no data source can be made of a builtins.list_iterator"),
        ([X, Y], "a list as data may mean arrays or samples"),
        ((X, Y[:5]), "the arrays of a data source must have one length, got 5, 6"),
        ((X, 5), r"must have one length, got 6, none \(a single number\)"),
        (np.array(5), r"must have one length, got none \(a single number\)"),
        ((), "must have one length, got no array"),
        ({}, "must have one length, got no array"),
        ((X[:0], Y[:0]), "the data source has no sample"),
        (Items(lambda i: i, length=0), "the data source has no sample"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        as_source(data)
    assert error.value.hint
