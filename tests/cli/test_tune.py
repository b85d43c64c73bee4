"""``hvdtrain tune`` as typed, and ``hvdtrain run`` with what it has stored."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from hvdtrain.bench.recipes import Wish
from hvdtrain.cli import main, tune
from hvdtrain.launch import Host, detect
from hvdtrain.tune import search, store, tries
from hvdtrain.tune.search import Arm, Ask, Comparison, Factor, Measured, Outcome
from hvdtrain.tune.store import Tuned
from tests.support.harness import RECIPES, ROOT, hvdtrain

DIGITS = ROOT / "examples" / "torch_digits.py"
FOUND = Tuned((("exchange", "horovod"), ("bucket", "16"), ("threads", "3"), ("mpi", "plain")), "2026-11-30 20:00", 0.8)
OWN = os.uname().nodename
TWO = ["-np", "2", "-H", "localhost:2", "--launcher", "mpirun"]


@pytest.fixture
def stored(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with ``FOUND`` for the recipe on two ranks of this machine, of which nobody says otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / "cache"))
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    Path("recipe.py").write_text("raise SystemExit('a recipe is loaded by the ranks')\n")
    from hvdtrain.config import resolve

    config = resolve("recipe.py", {"hidden": "3"}, {}, {}, None)
    path = store.key(config, (Host("localhost", 2),), "mpi", str(detect.look(os.environ).mpi or "")).path()
    store.write(path, FOUND, {})
    return path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What a dry run of two ranks prints."""
    assert main(["run", *TWO, "--dry-run", *words]) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["no.py"], "recipe 'no.py' does not exist", "check the path"),
        ([str(DIGITS), "--budget", "soon"], "--budget: expected a time", "--budget 5m"),
        ([str(DIGITS), "--over", "bucket,luck"], "there is no 'luck' to search", "known: exchange, bucket"),
        ([str(DIGITS), "--over", "compression"], "compression changes what is computed", "--allow-compression"),
        ([str(DIGITS), "--set", "hidden"], "--set takes NAME=VALUE", "--set hidden=VALUE"),
        ([str(DIGITS), "--seconds", "nan"], "'nan' is not a number of seconds", "hvdtrain tune"),
        ([str(DIGITS), "-H", f"{OWN.upper()}:2", "--share", f"{OWN}=0"], "no host has a share above 0", f"--share {OWN}=1"),
        ([str(DIGITS), "-np", "3", "-H", "localhost:2"], "3 processes requested", "--oversubscribe"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words, message, hint, capsys):
    assert main(["tune", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert hint in said


def test_a_result_that_cannot_be_stored_is_told_before_anything_starts(in_tmp: Path, capsys, monkeypatch):
    (in_tmp / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / "file"))
    monkeypatch.setattr(tune, "_drive", lambda *_: pytest.fail("something was started"))
    assert main(["tune", str(DIGITS), *TWO]) == 1
    said = capsys.readouterr().err
    assert "the result cannot be stored in " in said
    assert "set XDG_CACHE_HOME" in said


def test_where_nothing_can_be_set_nothing_is_started(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["tune", str(DIGITS)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "exchange was left out: one rank exchanges nothing" in said
    assert "threads was left out: you have set OMP_NUM_THREADS" in said
    assert said[-1] == "There is nothing to search. Several ranks have more to set: -np 2"


@pytest.mark.usefixtures("stored")
def test_a_run_uses_what_is_stored_for_it_and_says_so(capsys):
    out, err = shown(capsys, "recipe.py", "--set", "hidden=3")
    reason = "tuned: 0.80 of the defaults' step time (2026-11-30 20:00)"
    assert f"{reason}: exchange=horovod bucket=16 threads=3 mpi=plain; --no-tuned leaves it out" in err
    for setting in (
        "HVDTRAIN_TUNED=exchange=horovod,bucket_mb=16",
        "OMP_NUM_THREADS=3",
        "TF_NUM_INTRAOP_THREADS=3",
        "OMPI_MCA_coll_tuned_use_dynamic_rules=0",
    ):
        assert f"# {setting}: {reason}" in out.splitlines()
    assert "dynamic_rules_filename" not in out
    assert "# exchange of gradients: horovod (asked for)" in out


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("before", "words"),
    [([], ["recipe.py"]), (["--no-tuned"], ["recipe.py", "--set", "hidden=3"]), ([], ["recipe.py", "--set", "hidden=4"])],
)
def test_other_runs_and_no_tuned_have_the_defaults(before, words, capsys):
    out, err = shown(capsys, *before, *words)
    assert "tuned: " not in out + err


@pytest.mark.usefixtures("stored")
def test_whatever_the_user_sets_wins(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    out, err = shown(capsys, "recipe.py", "--set", "hidden=3")
    # Only what is used is told, and no ratio: it is that of all settings together.
    assert "tuned (2026-11-30 20:00): exchange=horovod bucket=16 mpi=plain; --no-tuned leaves it out" in err
    assert "_THREADS=3" not in out
    assert "# HVDTRAIN_TUNED=exchange=horovod,bucket_mb=16: tuned (2026-11-30 20:00)" in out.splitlines()
    # What is searched and set is another key: nothing was found for it.
    Path("c.yaml").write_text("exchange: auto\n")
    for words in (["--config", "c.yaml"], ["--exchange", "shared"], ["--bucket-mb", "2"]):
        out, err = shown(capsys, "recipe.py", "--set", "hidden=3", *words)
        assert "tuned" not in out.replace("coll_tuned", "") + err


def test_a_damaged_file_is_a_warning_and_the_defaults(stored, capsys):
    stored.write_text("{")
    out, err = shown(capsys, "recipe.py", "--set", "hidden=3")
    assert f"Warning: {stored} is damaged" in err
    assert "tuned: " not in out


def test_an_interrupt_ends_the_try_and_leaves_what_is_known(capsys):
    class Slow(tries.Job):
        def argv(self, ask: Ask) -> tuple[str, ...]:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # not before somebody waits for it
            return (sys.executable, "-c", "import time; time.sleep(60)")

    job = Slow(Wish("r.py"), (), {}, 1.0)
    outcome = tune._drive(search.search([Factor("exchange", ("horovod",))], 100.0), job, tune.Teller(100.0, ()))
    assert (outcome.ended_by, outcome.is_decided) == ("interrupt", False)
    assert "exchange: defaults: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comparison", "said"),
    [
        (None, "Nothing but the defaults could be measured: nothing is stored."),
        (
            Comparison((("exchange", "horovod"),), (), ()),
            "exchange=horovod could not be compared with the defaults: nothing is stored.",
        ),
    ],
)
def test_a_search_that_had_nothing_to_compare_stores_nothing(comparison, said, stored, capsys, monkeypatch):
    outcome = Outcome(
        (Arm("exchange", (), (1.0,), dropped=False),), comparison, (((("exchange", "horovod"),), "it fails"),), 9.0
    )
    monkeypatch.setattr(tune, "_drive", lambda *_: outcome)
    before = stored.read_bytes()
    assert main(["tune", "recipe.py", *TWO, "--set", "hidden=3"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["exchange=horovod was left out: it fails", said]
    assert [each.name for each in stored.parent.iterdir()] == [stored.name]
    assert stored.read_bytes() == before


@pytest.mark.usefixtures("stored")
def test_a_budget_that_is_too_short_is_an_error_and_what_would_do_is_named(capsys, monkeypatch):
    monkeypatch.setattr(tune.tries, "run", lambda argv, limit_s: Measured(0.01, 14.0, "shared"))
    assert main(["tune", "recipe.py", *TWO, "--over", "exchange,threads", "--budget", "30s"]) == 1
    err = capsys.readouterr().err
    assert "that job took 14 s; if the next ones do, --budget 3m is the least that can find something out" in err
    assert "--budget 30s is too short, and nothing was found out or stored: 1 job took 14 s" in err
    budget = err.splitlines()[-1].removeprefix("Hint: the same command with --budget ")
    assert main(["tune", "recipe.py", *TWO, "--over", "exchange,threads", "--budget", budget]) == 0
    assert "Nothing was faster than the defaults: they are kept." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value_s", "up", "text"),
    [
        (74.0, True, "80s"),
        (121.0, True, "3m"),
        (601.0, True, "15m"),
        (3601.0, True, "1.5h"),
        (90.0, False, "90s"),
        (900.0, False, "15m"),
    ],
)
def test_budgets_are_told_as_they_are_typed(value_s, up, text):
    assert tune._budget(value_s, up=up) == text


@pytest.mark.ranks
def test_two_ranks_are_tuned_and_trained_with_the_result(tmp_path: Path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    recipe = f"{RECIPES}:linear"  # the quickest to start; its gradients take one way only
    words = [*TWO, "--seconds", "0.1", "--budget", "10m", "--over", "exchange"]
    result = hvdtrain("tune", recipe, *words, cwd=tmp_path, timeout=400, **cache)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "exchange: defaults: " in result.stderr
    assert "exchange: exchange=horovod: " in result.stderr
    assert "exchange=shared was left out: this adapter's gradients are numbers of the communicator's" in result.stdout
    files = list((tmp_path / "cache" / "hvdtrain" / "tuned").iterdir())
    assert len(files) == 1
    # Which one is faster is not for a test to say: what is stored is made one that can be told from the defaults.
    store.write(files[0], Tuned((("exchange", "horovod"), ("bucket", "1")), "today", 0.9), {})
    trained = hvdtrain("run", *TWO, recipe, "--max-steps", "3", "--run-dir", tmp_path / "run", cwd=tmp_path, **cache)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "tuned: 0.90 of the defaults' step time (today)" in trained.stderr
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    for name, value in {"exchange": "horovod", "bucket_mb": 1.0}.items():
        assert (written["options"][name], written["origins"][name]) == (value, "tuned")
