"""What counts as proof that Horovod works."""

from __future__ import annotations

import json
import os

import pytest

from hvdtrain.horovod import buildinfo
from hvdtrain.horovod.mpi import find_mpi
from hvdtrain.horovod.shell import Result, search_path
from hvdtrain.horovod.verify import EXPECTED, check, judge


def _answer(size: int, *weights: float) -> str:
    return json.dumps({"size": size, "weights": weights})


@pytest.mark.parametrize(
    ("result", "answer", "said"),
    [
        (Result(0, ""), _answer(2, EXPECTED, EXPECTED), ""),
        (Result(0, ""), _answer(1, EXPECTED), "one of 1, not of 2"),
        (Result(0, ""), _answer(2, EXPECTED, 2.5), "wrong result"),
        (Result(0, ""), "", "exit code 0"),
        (Result(-9, "", timed_out=True), "", "no end after 180 s"),
        (Result(1, "Traceback\n  x\nImportError: no such symbol\nmpirun: ended\n"), "", "ImportError: no such symbol"),
        (Result(1, "[1]<stderr>:ValueError: odd\nProcess 0 exit\n"), "", "ValueError: odd"),
        (Result(1, "mpirun was unable to start\n"), "", "mpirun was unable to start"),
    ],
)
def test_judge(result: Result, answer: str, said: str) -> None:
    problem = judge(result, answer)
    assert problem == "" if said == "" else said in problem


@pytest.mark.ranks
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
@pytest.mark.parametrize("framework", sorted(buildinfo.installed_frameworks()))
def test_two_ranks_of_this_environment_train_to_the_exact_weights(framework: str, controller: str) -> None:
    mpi = find_mpi(search_path())
    assert mpi is not None
    outcome = check(framework, controller, mpi, os.environ, search_path())
    assert outcome.problem == "", outcome.output
