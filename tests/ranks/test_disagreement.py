"""One rank goes wrong: every rank ends soon, with a message that names the rank and the tensor."""

from __future__ import annotations

import time

import pytest

from tests.support.harness import ROOT, hvdtrain

pytestmark = pytest.mark.ranks

#: fault, framework -> what the message must name
FAULTS = {
    ("steps", "torch"): ["rank 1 is set up otherwise than rank 0", "samples 190 instead of 200"],
    ("shape", "torch"): ["rank 1 on ", "'model/first.weight float32 (9, 12)'", "'model/first.weight float32 (8, 12)'"],
    ("order", "torch"): ["rank 1 on ", "its tensor 0 is 'model/second.weight", "that of rank 0 is 'model/first.weight"],
    ("nan", "torch"): ["training step, step 3", "the gradient of first.weight", "is not finite on rank 1", "the loss is nan"],
    ("drift", "torch"): ["second.bias was changed outside of the optimizer", "--exchange horovod"],
    ("drift", "torch --exchange horovod"): ["the ranks have drifted apart", "differs in model/second.bias"],
    ("skip", "torch"): ["no progress for 8 s", "rank 0 waits in the exchange of gradients with rank 1", "faults.py:"],
    ("shape", "keras"): ["rank 1 on ", "first/kernel float32 (12, 9)", "first/kernel float32 (12, 8)"],
    ("nan", "keras"): ["training step, step 3", "first/kernel", "is not finite on rank 1", "the loss is nan"],
    ("drift", "keras"): ["the ranks have drifted apart: rank 1", "second/bias", "training step, step 5"],
    ("drift", "keras --exchange horovod"): ["the ranks have drifted apart", "second/bias"],
    ("skip", "keras"): ["no progress for 8 s", "rank 0 waits in the exchange of gradients with rank 1", "faults.py:"],
}


@pytest.mark.parametrize(("fault", "framework"), FAULTS)
def test_a_rank_that_goes_wrong_ends_the_job_with_its_name(tmp_path, monkeypatch, fault, framework):
    parts = FAULTS[fault, framework]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HVDTRAIN_STALL_TIMEOUT", "8")  # by default 60
    command = ["run", "-np", "2", "-H", "localhost:2", "--launcher", "mpirun", ROOT / "tests/support/faults.py"]
    framework, *more = framework.split()
    options = ["--set", f"fault={fault}", "--set", f"framework={framework}", "--log-every", "100", *more]
    options += ["--check-every", "8"] if fault == "drift" else []
    started = time.monotonic()
    result = hvdtrain(*command, *options, cwd=tmp_path, timeout=120)
    took = time.monotonic() - started
    output = result.stdout + result.stderr
    print(f"{fault:6} {framework:6} {took:5.1f} s, exit code {result.returncode}")
    assert result.returncode not in (0, 130, 137, 143), output
    for part in parts:
        assert part in output, output
    assert took < 60  # imports included; the message itself is due within 30 s of the fault
