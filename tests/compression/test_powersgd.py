"""Low rank, and what it is good for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvdtrain.compression import powersgd
from hvdtrain.compression.powersgd import PowerSgd, matrix_shape, multiply
from hvdtrain.compression.powersgd import _orthonormal as orthonormal
from tests.support.links import ThreadLink, on_ranks


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((100,), None),
        ((), None),
        ((0, 5), None),
        ((8, 8), None),  # two factors of 8 x 4 are as large
        ((20, 10), (20, 10)),
        ((64, 32, 3, 3), (64, 288)),  # a convolution in PyTorch: outputs first
        ((3, 3, 32, 64), (288, 64)),  # in Keras: outputs last
        ((5000, 3), None),
    ],
)
def test_tensors_are_matrices_where_that_gains_something(shape, wanted):
    assert matrix_shape(shape, 4) == wanted


def test_a_sum_of_that_rank_is_exact_from_the_first_step_on():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 50, 2)), rng.normal(size=(2, 40, 2))
    parts = np.einsum("kir,kjr->kij", left, right).astype(np.float32)  # the sum has rank 4

    def work(link: ThreadLink) -> np.ndarray:
        matrix = parts[link.rank].copy()
        PowerSgd(4).exchange("b", [matrix], link)
        return matrix

    for found in on_ranks(2, work):
        np.testing.assert_allclose(found, parts.sum(0), atol=1e-4)


def test_a_warm_start_finds_the_largest_part_of_a_gradient_that_stays():
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(60, 60)))[0]
    gradient = (basis * 0.9 ** np.arange(60) @ np.linalg.qr(rng.normal(size=(60, 60)))[0]).astype(np.float32)
    best = np.linalg.norm(0.9 ** np.arange(4, 60))

    def work(link: ThreadLink) -> list[float]:
        compressor, errors = PowerSgd(4), []
        for _ in range(40):
            matrix = gradient / 2
            bases = {key: value for key, value in compressor.state().items() if key.startswith("basis")}
            compressor.load(bases, primary=True)  # the same matrix in every step
            compressor.exchange("b", [matrix], link)
            errors.append(float(np.linalg.norm(matrix - gradient)))
        return errors

    errors = on_ranks(2, work)[0]
    assert errors[0] > 1.15 * best
    assert errors[-1] < 1.02 * best


def test_a_layer_that_had_no_gradient_comes_in_when_it_has_one():
    rng = np.random.default_rng(2)
    part = np.outer(rng.normal(size=30), rng.normal(size=20)).astype(np.float32)

    def work(link: ThreadLink) -> np.ndarray:
        compressor = PowerSgd(2)
        compressor.exchange("b", [np.zeros((30, 20), np.float32)], link)
        total = np.zeros((30, 20), np.float32)
        for step in range(20):
            matrix = part.copy() if step == 0 else np.zeros_like(part)
            compressor.exchange("b", [matrix], link)
            total += matrix
        return total

    np.testing.assert_allclose(on_ranks(2, work)[0], 2 * part, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_a_product_has_the_same_bits_in_whatever_order_it_is_added_up(rank):
    rng = np.random.default_rng(3)
    for rows, columns in ((300, 700), (3, 70_001), (1, 1)):
        left, right = (rng.normal(size=(length, rank)) * 10.0 ** rng.integers(-9, 9, rank) for length in (rows, columns))
        left, right = left.astype(np.float32), right.astype(np.float32)
        found, other = np.empty((2, rows, columns), np.float32)
        multiply(left, right, out=found)
        order = np.roll(np.arange(rank)[::-1], 1)
        multiply(left[:, order], right[:, order], out=other)
        np.testing.assert_array_equal(found, other)
        bound = rank * 2.0**-22 * np.abs(left).max() * np.abs(right).max()
        np.testing.assert_allclose(found, left @ right.T, rtol=1e-5, atol=bound)


def test_a_step_that_fails_on_its_way_is_not_owed():
    rng = np.random.default_rng(5)
    parts = rng.normal(size=(2, 2, 30, 20)).astype(np.float32)

    class Fails(ThreadLink):
        def sum(self, array):
            raise ConnectionError("the other rank is gone")

    def work(link: ThreadLink) -> tuple[np.ndarray, np.ndarray]:
        compressor = PowerSgd(2)
        compressor.exchange("b", [parts[link.rank, 0].copy()], link)
        before = compressor.state()["residual/b"]
        compressor.exchange("b", [np.zeros((30, 20), np.float32)], link)
        broken = Fails(link.rank, link._barrier, link._table)
        wanted = compressor.state()["residual/b"]
        with pytest.raises(ConnectionError):
            compressor.exchange("b", [parts[link.rank, 1].copy()], broken)
        assert not np.array_equal(before, wanted)
        return compressor.state()["residual/b"], wanted

    for found, wanted in on_ranks(2, work):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_hosts_whose_decompositions_round_differently_get_the_same_bits_and_lose_nothing(monkeypatch):
    rng = np.random.default_rng(4)
    parts = rng.normal(size=(2, 3, 30, 20)).astype(np.float32)
    here = threading.local()
    monkeypatch.setattr(powersgd, "_orthonormal", lambda matrix: -orthonormal(matrix) if here.rank else orthonormal(matrix))

    def work(link: ThreadLink) -> tuple[list[np.ndarray], np.ndarray]:
        here.rank = link.rank
        compressor, results = PowerSgd(2), []
        for part in parts[link.rank]:
            matrix = part.copy()
            compressor.exchange("b", [matrix], link)
            results.append(matrix)
        return results, compressor.state()["residual/b"]

    (first, owed), (second, also) = on_ranks(2, work)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(sum(first).reshape(-1) + owed + also, parts.sum((0, 1)).reshape(-1), atol=1e-4)
