"""What every compressor promises: equal bits on all ranks, nothing lost, nothing hidden, a state that any number of ranks resume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compression import Compressor
from hvdtrain.compression.choose import parse
from hvdtrain.compression.feedback import handed
from tests.support.links import ThreadLink, links, links_of_hosts, on_links, on_ranks

NAMES = ["bfloat16", "float16", "topk:0.05", "powersgd:2"]
OWING = NAMES[1:]
SHAPES = ((40, 30), (7,), (3, 3, 8, 16), (5, 2), (1,))


def made(name: str) -> Compressor:
    found = parse(name)
    assert found is not None
    return found


def bucket(values: np.ndarray, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Views of one flat array that holds ``values``."""
    flat = np.array(values, np.float32)
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    assert ends[-1] == flat.size
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def gradients(steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    """[steps, ranks, SIZE]: a part that all share and stays, and noise."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=SIZE) * 2)
    return (scales * (rng.normal(size=SIZE) + 0.3 * rng.normal(size=(steps, ranks, SIZE)))).astype(np.float32)


def joined(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.reshape(-1) for tensor in tensors])


def applied(
    name: str, given: np.ndarray, compressors: Sequence[Compressor] | None = None, hosts: Sequence[int] = ()
) -> np.ndarray:
    """[ranks, steps, SIZE]: what each rank got out of each step's exchange."""
    compressors = compressors or [made(name) for _ in range(given.shape[1])]

    def work(link: ThreadLink) -> np.ndarray:
        results = []
        for step in given:
            tensors = bucket(step[link.rank])
            compressors[link.rank].exchange("b", tensors, link)
            results.append(joined(tensors))
        return np.array(results)

    return np.array(on_links(links_of_hosts(hosts) if hosts else links(given.shape[1]), work))


def owed(compressor: Compressor) -> np.ndarray:
    return compressor.state().get("residual/b", np.zeros(SIZE, np.float32))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_get_the_same_bits(name, ranks):
    found = applied(name, gradients(4, ranks))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_of_a_host_compress_their_sum_as_one_rank_would(name):
    given, hosts = gradients(3, 5), (2, 2, 1)
    compressors = [made(name) for _ in range(5)]
    found = applied(name, given, compressors, hosts)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    sums = np.stack([given[:, 0] + given[:, 1], given[:, 2] + given[:, 3], given[:, 4]], axis=1)
    np.testing.assert_array_equal(found[0], applied(name, sums)[0])
    everyone = links_of_hosts(hosts)
    on_links(everyone, lambda link: compressors[link.rank].settle(link))
    assert not any(owed(compressor).any() for compressor in compressors[1:])


@pytest.mark.parametrize("name", NAMES)
def test_a_single_rank_keeps_its_gradients(name):
    given = gradients(2, 1)
    np.testing.assert_array_equal(applied(name, given)[0], given[:, 0])


@pytest.mark.parametrize(("name", "error"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_16_bits_are_right_to_their_precision(name, error):
    given = np.abs(gradients(1, 3))
    np.testing.assert_allclose(applied(name, given)[0], given.sum(1), rtol=error)


@pytest.mark.parametrize("name", OWING)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), ranks=st.sampled_from([2, 3]), exponent=st.integers(-30, 30))
def test_what_was_applied_and_what_is_owed_are_all_that_was_given(name, seed, ranks, exponent):
    given = gradients(5, ranks, seed) * np.float32(2.0**exponent)
    compressors = [made(name) for _ in range(ranks)]
    total = applied(name, given, compressors)[0].sum(0, dtype=np.float64) + sum(map(owed, compressors))
    scale = np.abs(given).sum((0, 1))
    # PowerSGD moves weight between the elements of a matrix: its rounding is that of the largest one.
    scale = np.full_like(scale, scale.max()) if name.startswith("powersgd") else scale
    assert np.abs(total - given.sum((0, 1), dtype=np.float64)).max(initial=0, where=scale > 0) <= 2e-6 * scale.max()
    assert (np.abs(total - given.sum((0, 1), dtype=np.float64)) <= 3e-6 * scale).all()


@pytest.mark.parametrize("name", OWING)
def test_a_gradient_that_stays_is_applied_in_full_in_the_long_run(name):
    steps = 150
    given = np.repeat(gradients(1, 2), steps, axis=0)
    found = applied(name, given)[0].mean(0)
    wanted = given[0].sum(0)
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_seen_by_all_and_forgotten(name, bad):
    given = gradients(3, 2)
    given[1, 1, 11] = bad
    given[1, 0, 1203] = bad  # in a tensor of one dimension
    compressors = [made(name) for _ in range(2)]
    found = applied(name, given, compressors)
    assert np.isfinite(found[:, 0]).all()
    assert not np.isfinite(found[:, 1, 11]).any()
    assert not np.isfinite(found[:, 1, 1203]).any()
    assert np.isfinite(found[:, 2]).all()
    assert all(np.isfinite(value).all() for compressor in compressors for value in compressor.state().values())


@pytest.mark.parametrize("later", [1, 2, 3])
@pytest.mark.parametrize("name", OWING)
def test_a_settled_state_is_resumed_by_any_number_of_ranks_and_nothing_is_lost(name, later):
    before, after = gradients(3, 2), gradients(3, later, seed=1)
    first = [made(name) for _ in range(2)]
    total = applied(name, before, first)[0].sum(0, dtype=np.float64)
    on_ranks(2, lambda link: first[link.rank].settle(link))
    assert not owed(first[1]).any()
    state = first[0].state()
    second = [made(name) for _ in range(later)]
    for rank, compressor in enumerate(second):
        compressor.load(state, primary=rank == 0)
    found = applied(name, after, second)
    assert all(np.array_equal(other, found[0]) for other in found)
    total += found[0].sum(0, dtype=np.float64) + sum(map(owed, second))
    wanted = before.sum((0, 1), dtype=np.float64) + after.sum((0, 1), dtype=np.float64)
    np.testing.assert_allclose(total, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_copy_and_a_loaded_compressor_goes_on_with_the_same_bits(name):
    given = gradients(6, 2)
    straight = applied(name, given)
    first = [made(name) for _ in range(2)]
    applied(name, given[:3], first)
    states = [compressor.state() for compressor in first]
    applied(name, gradients(1, 2, seed=5), first)  # must not change what was copied
    second = [made(name) for _ in range(2)]
    for compressor, state in zip(second, states, strict=True):
        compressor.load(state, primary=True)  # each its own residual
    np.testing.assert_array_equal(applied(name, given[3:], second), straight[:, 3:])


@pytest.mark.parametrize("name", NAMES)
def test_a_bucket_that_changes_its_size_begins_anew(name):
    compressors = [made(name) for _ in range(2)]
    applied(name, gradients(1, 2), compressors)

    def work(link: ThreadLink) -> np.ndarray:
        tensors = bucket(np.full(6 * 50, 2.0), [(6, 50)])
        compressors[link.rank].exchange("b", tensors, link)
        return joined(tensors)

    found = on_ranks(2, work)
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_tensors_with_a_gap_between_them_are_no_bucket():
    flat = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match="one after the other"):
        on_ranks(2, lambda link: made("bfloat16").exchange("b", [flat[:4], flat[5:]], link))


@pytest.mark.parametrize("name", ["topk:0.05 from step 2 on", *OWING])
def test_who_takes_over_a_state_keeps_its_own_debts_and_gets_no_arrays_of_others(name):
    given = gradients(4, 2)
    name, steps = (name.split()[0], 2) if " from " in name else (name, 0)
    compressors = [parse(name, warmup=steps) for _ in range(2)]
    applied(name, given, compressors)
    state = handed(compressors[0].state())
    assert not [value for key, value in state.items() if value.size >= SIZE]
    before = compressors[1].state()
    compressors[1].load(state, primary=False)
    np.testing.assert_equal(compressors[1].state(), before)
    # One that joins owes nothing, and is asked for no other buckets than the rest when debts are added up.
    joined_now = parse(name, warmup=steps)
    joined_now.load(state, primary=True)
    assert not owed(joined_now).any()
    everyone = [*compressors, joined_now]
    total = sum(map(owed, everyone))
    on_ranks(3, lambda link: everyone[link.rank].settle(link))
    np.testing.assert_allclose(owed(compressors[0]), total, rtol=1e-5, atol=1e-6 * np.abs(total).max())
    compressors[1].load(handed(compressors[0].state(), keep=False), primary=False)
    assert not owed(compressors[1]).any()
