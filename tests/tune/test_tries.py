"""One try: its command, its time limit, what is made of what it says."""

from __future__ import annotations

import sys
import time

import pytest

from hvdtrain.bench import job
from hvdtrain.bench.recipes import Wish
from hvdtrain.tune import tries
from hvdtrain.tune.search import Ask, Failed


def test_a_try_is_a_job_of_hvdtrain_run_with_the_settings() -> None:
    common = tries.Job(Wish("r.py", {"hidden": "3"}, {"batch_size": 32}), ("-np", "2"), {"HOROVOD_FUSION_THRESHOLD": "0"}, 0.5)
    argv = common.argv(Ask((("exchange", "horovod"), ("bucket", "16"), ("cycle", "0.5")), 10.0, ""))
    at = argv.index("--")
    wanted = ["-np", "2", "--env", "HOROVOD_FUSION_THRESHOLD=0", "--env", "HOROVOD_CYCLE_TIME=0.5"]
    assert list(argv[argv.index("run") + 1 : at]) == ["--no-prefix", *wanted]
    assert argv[at + 5 :] == tuple(
        job.argv("step", job.step.Plan(Wish("r.py", {"hidden": "3"}, {"batch_size": 32, "bucket_mb": "16"}), "horovod", 0.5))
    )


def test_an_exchange_of_the_users_is_that_of_all_tries() -> None:
    common = tries.Job(Wish("r.py", options={"exchange": "shared"}), (), {}, 0.5)
    assert '"exchange": "shared", "seconds"' in common.argv(Ask((), 10.0, ""))[-1]


@pytest.mark.parametrize(
    ("chosen", "engine"),
    [
        ("shared memory (the 2 ranks share this host's memory); each rank updates its share", "shared"),
        ("horovod, bfloat16 (asked for)", "horovod"),
        ("", ""),
    ],
)
def test_the_engine_is_what_the_adapter_tells_of(chosen: str, engine: str) -> None:
    assert tries.engine(chosen) == engine


def test_the_reason_of_a_failure_is_its_last_error_else_its_last_words() -> None:
    assert tries.reason(["Error: first", "Error: --exchange: no", "Hint: use auto", ""], 1) == "--exchange: no"
    assert tries.reason(["Error: rank 1 on vm failed first in phase 'setting up': no room"], 1) == "no room"
    assert tries.reason(["launcher: mpirun", "Segmentation fault", " "], 139) == "Segmentation fault"
    assert tries.reason([], 3) == "its job ended with exit code 3"


def test_a_try_that_fails_is_no_error() -> None:
    failed = tries.run((sys.executable, "-c", "raise SystemExit('Error: no')"), 60.0)
    assert isinstance(failed, Failed)
    assert failed.reason == "no"


def test_a_try_ends_at_its_limit() -> None:
    began = time.monotonic()
    failed = tries.run((sys.executable, "-c", "import time; time.sleep(600)"), 0.2)
    assert isinstance(failed, Failed)
    assert failed.reason == "its job had not ended after 0 s"
    assert failed.took_s == pytest.approx(time.monotonic() - began, rel=0.5)
