"""What is searched where, and how a job is told of it."""

from __future__ import annotations

import pytest

from hvdtrain.launch import defaults
from hvdtrain.tune import space
from hvdtrain.tune.search import Factor
from hvdtrain.tune.space import Facts

ONE_HOST = Facts(slots=(2,), cpus=8, threads=4)


def test_on_one_host_everything_but_compression_is_searched() -> None:
    factors, left_out = space.factors(list(space.NAMES), ONE_HOST)
    assert [factor.name for factor in factors] == ["exchange", "bucket", "cycle", "threads", "mpi"]
    assert factors[3] == Factor("threads", ("2", "8"))
    assert {factor.name for factor in factors if factor.engine == "horovod"} == {"bucket", "cycle", "mpi"}
    assert left_out == {(("compression", ""),): "it acts between hosts, and this is one"}


@pytest.mark.parametrize(
    ("facts", "missing", "why"),
    [
        (Facts((2, 1), 8, 4), (("exchange", "shared"),), "the hosts have different numbers of ranks"),
        (Facts((1, 1), 8, 4), (("exchange", "shared"),), "each rank is alone on its host"),
        (Facts((2,), 8, 4, over_mpi=False), (("exchange", "shared"),), "the ranks meet over Gloo, shared memory needs MPI"),
        (Facts((1,), 8, 8), (("exchange", ""),), "one rank exchanges nothing"),
        (Facts((2,), 1, 1), (("threads", ""),), "each rank has one thread, and this host 1 CPU"),
        (Facts((2,), 8, 4, no_mpi="it is for Open MPI"), (("mpi", ""),), "it is for Open MPI"),
        (Facts((2,), 8, 4, options=frozenset({"bucket_mb"})), (("bucket", ""),), "you have set --bucket-mb"),
        (
            Facts((2,), 8, 4, variables=frozenset({"TF_NUM_INTRAOP_THREADS"})),
            (("threads", ""),),
            "you have set TF_NUM_INTRAOP_THREADS",
        ),
    ],
)
def test_what_cannot_be_is_left_out_with_the_reason(facts: Facts, missing: space.Settings, why: str) -> None:
    factors, left_out = space.factors(list(space.NAMES), facts)
    assert left_out[missing] == why
    ((name, value),) = missing
    assert not [factor for factor in factors if factor.name == name and (not value or value in factor.values)]


@pytest.mark.parametrize(
    ("compression", "values"), [("none", ("1", "16", "64")), ("topk:0.01", ("1", "16", "64")), ("powersgd:2", ("1", "4", "64"))]
)
def test_of_buckets_those_that_are_not_the_default_are_tried(compression: str, values: tuple[str, ...]) -> None:
    facts = Facts((2, 2), 8, 4, compression=compression)
    assert space.factors(["bucket"], facts)[0] == (Factor("bucket", values, "horovod"),)
    assert all(space.is_value("bucket", value) for value in values)


def test_settings_are_options_of_train_and_variables_of_the_ranks() -> None:
    settings = (("exchange", "horovod"), ("bucket", "16"), ("cycle", "0.5"), ("threads", "2"), ("mpi", "plain"))
    assert space.options_of(settings) == {"exchange": "horovod", "bucket_mb": "16"}
    assert space.wishes_of(settings) == space.options_of(settings)
    variables = space.variables_of(settings)
    assert variables == {
        "HOROVOD_CYCLE_TIME": "0.5",
        "OMP_NUM_THREADS": "2",
        "TF_NUM_INTRAOP_THREADS": "2",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "0",
    }
    # With it, the launch defaults leave the ring alone.
    assert defaults.chooses_algorithms(variables, (), ())


def test_a_run_takes_shared_memory_only_if_there_is_room_for_it_by_then() -> None:
    settings = (("exchange", "shared"),)
    assert (space.options_of(settings), space.wishes_of(settings)) == ({"exchange": "shared"}, {"exchange": "prefer-shared"})


def test_every_factor_can_be_told() -> None:
    assert {*space.OPTIONS, *space.VARIABLES} == {*space.NAMES}
