"""``hvdtrain run`` as typed: what is printed, what is refused, with which exit code."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdtrain import rundir
from hvdtrain.cli import main, run
from hvdtrain.cli.work import Work
from hvdtrain.errors import UsageError
from hvdtrain.launch import linux, relay
from hvdtrain.rundir import RunDir

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "recipe.py").write_text("raise SystemExit('a recipe is loaded by the ranks, not by the launcher')\n")
    return tmp_path


def argv_of(line: str) -> list[str]:
    """The words after ``env NAME=VALUE ...``, those of the program as the relay starts it."""
    words = shlex.split(line)
    if words[0] == "env":
        del words[0]
        while words[0] == "-i" or "=" in words[0]:
            del words[0]
    return list(map(relay.unguarded, words))


@pytest.mark.usefixtures("_here")
def test_the_dry_run_of_a_recipe_is_a_train_command_with_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "a=b c", "--epochs", "3"]
    assert main(["run", "-np", "2", "--launcher", "mpirun", "--dry-run", "recipe.py", *given]) == 0
    argv = argv_of(capsys.readouterr().out.splitlines()[-1])
    at = argv.index("-m")
    assert argv[at - 2 : at + 5] == [sys.executable, "-P", "-m", "hvdtrain", "train", "recipe.py", "--run-dir"]
    assert argv[at + 5].startswith("runs/recipe-2")
    assert argv[at + 6 :] == given
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("given", [["--run-dir", "out/x"], ["--run-dir=out/x"]])
def test_a_run_directory_of_the_users_is_left_as_it_is(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "--launcher", "mpirun", "--dry-run", "recipe.py:build", *given]) == 0
    assert argv_of(capsys.readouterr().out.splitlines()[-1])[-len(given) - 1 :] == ["recipe.py:build", *given]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("given", [["--env", "HVDTRAIN_RUN_DIR=out/x"], ["--env-file", "variables"]])
def test_a_run_directory_that_the_ranks_get_as_a_variable_is_the_jobs(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("variables").write_text("HVDTRAIN_RUN_DIR=out/x\n")
    words = ["run", "-np", "2", "--launcher", "mpirun", "--dry-run", *given, "recipe.py"]
    assert main(words) == 0
    assert argv_of(capsys.readouterr().out.splitlines()[-1])[-2:] == ["train", "recipe.py"]
    Path("out").write_text("")
    assert main(["run", "-np", "2", *given, "recipe.py"]) == 2
    assert "out/x" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_a_resume_that_the_ranks_get_as_a_variable_is_known_at_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Work] = []

    def start(work: Work, *_: object, **__: object) -> None:
        started.append(work)
        raise UsageError("enough")

    monkeypatch.setattr(run, "_start", start)
    assert main(["run", "--dry-run", "--env", "HVDTRAIN_RESUME=never", "--env", "HVDTRAIN_RUN_DIR=out/x", "recipe.py"]) == 2
    assert (started[0].resume, started[0].run_dir) == ("never", Path("out/x"))
    assert started[0].again().argv[-2:] == ("--resume", "auto")


HARD = [
    "--np",
    "3",
    "-h",
    "",
    "a b",
    "$HOME",
    '"quote"',
    "it's",
    "new\nline",
    "tab\t",
    "ünïcode",
    "*",
    "--",
    "-np",
    "\\",
    "`id`",
]


@pytest.mark.usefixtures("_here")
def test_everything_after_the_dashes_reaches_the_program_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    show = "import sys; sys.stdout.write(ascii(sys.argv[1:]) + chr(10))"
    assert main(["run", "-np", "2", "--launcher", "mpirun", "--", sys.executable, "-c", show, *HARD]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "code" in line]
    assert len(lines) == 2
    assert all(line.endswith(ascii(HARD)) for line in lines)


REFUSED = {
    ("run",): "nothing to run: no recipe, no program, and no hvdtrain.yaml in ",
    ("run", "-np", "2", "--"): "nothing to run: no program after --",
    ("run", "-np", "2", "nope.py"): "recipe 'nope.py' does not exist",
    ("run", "-np", "2", "nope.py:build"): "recipe 'nope.py' does not exist",
    ("run", "-np", "2", "hostname"): "'hostname' is no recipe (to start a program, put -- before it)",
    ("run", "--hostfile", "nope", "recipe.py"): "hostfile 'nope' does not exist",
    ("run", "--hostfile", "nope", "-H", "a:1", "recipe.py"): "both -H and a hostfile are given",
    ("run", "-np", "8", "-H", "node01:4,node02:2", "recipe.py"): (
        "8 processes requested, '-H node01:4,node02:2' offers 6 slots (node01: 4, node02: 2)"
    ),
    ("run", "-np", "2", "-H", "localhost", "recipe.py"): "2 processes requested, '-H localhost' offers 1 slot (localhost: 1)",
    ("run", "-np", "0", "recipe.py"): "-np must be a positive integer, got 0",
    ("run", "-H", "a:2,-oProxyCommand=x:2", "recipe.py"): "-H, item 2: host name '-oProxyCommand=x' begins with '-'",
    ("run", "-H", "a", "--strict", "recipe.py"): "-H, item 1: 'a' has no slots",
    ("run", "-H", "nosuchuser@localhost", "recipe.py"): "ranks on this machine run as ",
    ("run", "--env", "HOROVOD_CONTROLLER=gloo", "recipe.py"): "HOROVOD_CONTROLLER=gloo for the ranks contradicts --mpi",
    ("run", "--launcher", "mpirun", "--no-relay", "--", "-x", "A=1"): (
        "Open MPI's mpirun takes words of the program for its own: '-x', which is no program"
    ),
}


#: words after "run" -> the error, the hint
MISPLACED = {
    "recipe.py -np 2": ("'-np' is an option of run, and belongs before the recipe", "hvdtrain run -np 2 recipe.py"),
    "-np 2 recipe.py --set a=1 --hostfile=x --dry-run": (
        "'--hostfile' is an option of run, and belongs before the recipe",
        "hvdtrain run -np 2 --hostfile=x --dry-run recipe.py --set a=1",
    ),
    "-np 2 recipe.py --epoch 3": ("hvdtrain train has no option '--epoch'", "did you mean --epochs"),
    "-np 2 recipe.py --epochs x": ("Invalid value for '--epochs': 'x'", "hvdtrain train --help"),
    "-np 2 recipe.py more": ("Got unexpected extra argument (more)", "hvdtrain train --help"),
    "--epochs 1 -np 2 recipe.py": (
        "'--epochs' is an option of train, and belongs after the recipe",
        "hvdtrain run -np 2 recipe.py --epochs 1",
    ),
    "-np 2 --config c.yaml": (
        "'--config' is an option of train, and belongs after the recipe",
        "hvdtrain run -np 2 RECIPE.py --config c.yaml",
    ),
    "--seed=1 -- prog -np 2": ("'--seed' is an option of train", "hvdtrain run RECIPE.py --seed=1"),
}


@pytest.mark.parametrize("words", MISPLACED)
def test_an_option_on_the_wrong_side_is_told_before_the_start(
    words: str,
    _here: Path,  # noqa: PT019
    capsys: pytest.CaptureFixture[str],
) -> None:
    message, hint = MISPLACED[words]
    assert main(["run", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {message}")
    assert f"\nHint: {hint}" in said
    assert not (_here / "runs").exists()


#: options of train -> what is told once, and not by each rank
JUDGED = {
    "--exchange nccl": "command line: exchange: expected one of 'auto', 'horovod', 'shared', 'prefer-shared', got 'nccl'",
    "--compression topk:5": "--compression topk:5: the share must be above 0 and at most 0.5, got '5'",
    "--exchange shared --compression bfloat16": "--exchange shared is not possible: --compression bfloat16 goes with horovod",
    "--batch-size 4 --batch-size-per-rank 2": "command line: batch_size and batch_size_per_rank exclude each other",
    "--loader-workers 2 --prefetch 0": "--loader-workers 2 loads ahead of the step, and --prefetch 0 forbids it",
    "--keep-best loss": "--keep-best takes the name of a validation figure and min or max, got 'loss'",
    "--share a=x": "--share a=x: 'a=x' is no HOST=SHARE with a whole number",
}


@pytest.mark.parametrize("words", JUDGED)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_values_that_train_would_refuse_are_told_before_the_start(
    words: str,
    dry: list[str],
    _here: Path,  # noqa: PT019
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-np", "2", "--launcher", "mpirun", *dry, "recipe.py", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == f"Error: {JUDGED[words]}"
    assert said.out == ""
    assert not (_here / "runs").exists()


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("where", "why"),
    [
        (["-H", "a:1,b:1", "--gloo"], "the ranks meet over Gloo, shared memory needs MPI"),
        (["-H", "a:1,b:1", "--env", "HVDTRAIN_COMPRESSION=topk"], "--compression topk goes with horovod"),
    ],
)
def test_shared_memory_that_no_place_of_the_ranks_allows_is_refused(
    where: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--dry-run", "--no-probe", *where, "recipe.py", "--exchange", "shared"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_a_value_of_the_environments_is_looked_at_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "-np", "2", "--dry-run", "--env", "HVDTRAIN_COMPRESSION=topk:5", "recipe.py"]
    assert main(words) == 2
    assert "--compression topk:5: the share must be" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (["-np", "2"], [], "shared memory (the 2 ranks share this host's memory), if the model"),
        (["-np", "2"], ["--compression", "topk"], "horovod (--compression topk goes with horovod)"),
        (["-np", "2", "--gloo"], [], "horovod (the ranks meet over Gloo, shared memory needs MPI)"),
        (["-H", "a:2,b:2", "--no-probe"], [], "horovod (several hosts)"),
        (["-H", "a:2,b:2", "--no-probe"], ["--exchange", "shared"], "shared memory (asked for), if the model"),
        (
            ["-H", "localhost:1,a:1", "--no-probe"],
            ["--exchange", "shared"],
            "shared memory (asked for, and the ranks will know who shares memory), if the model",
        ),
        (["-np", "1"], [], "none, it is one rank"),
    ],
)
def test_the_dry_run_names_the_exchange_as_far_as_it_can_be_known(
    before: list[str], after: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *before, "--dry-run", "recipe.py", *after]) == 0
    assert f"# exchange of gradients: {told}" in capsys.readouterr().out


def test_without_a_recipe_the_ranks_train_what_the_config_file_names(_here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    config = _here / "hvdtrain.yaml"
    words = ["run", "-np", "2", "--launcher", "mpirun", "--dry-run"]
    for text, ends in (("recipe: recipe.py", "train --run-dir runs/recipe-2"), ("recipe: recipe.py\nrun_dir: x", "train")):
        config.write_text(text)
        assert main(words) == 0
        assert re.search(rf" -m hvdtrain {ends}[-0-9]*$", " ".join(argv_of(capsys.readouterr().out.splitlines()[-1])))
    config.write_text("epochs: 1")
    assert main(words) == 2
    assert "Error: hvdtrain.yaml names no recipe\n" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("words", REFUSED)
def test_a_usage_error_is_two_lines_and_exit_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert f"Error: {REFUSED[words]}" in said.err
    assert "\nHint: " in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_every_option_is_under_a_heading_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == ["Where", "Launcher", "ssh", "Elastic", "Environment", "Output", "Ends", "Other"]
    assert re.findall(r"^  (-\S+)", text.partition("\nOther:\n")[2], re.MULTILINE) == ["-h,"]


@pytest.mark.usefixtures("_here")
def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    words = ["--no-probe", "--launcher", "mpirun", "--dry-run", "--", "true"]
    assert main(["run", "-H", "a:2,b:2", "-np", "3", *words]) == 0
    told = capsys.readouterr().err
    assert "not used: 1 of 2 slots of b\n" in told
    assert "not sent to other hosts: HF_TOKEN (looks like a secret: --env NAME passes it)\n" in told
    assert "hunter2" not in told
    assert main(["run", "-np", "2", *words]) == 0
    assert "not " not in capsys.readouterr().err


def test_an_argument_of_the_users_that_is_too_long_is_not_blamed_on_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "--dry-run", "--", "python", "-c", "x" * 200_000]) == 2
    told = capsys.readouterr().err
    assert "Error: the value of -c would be 200,000 bytes long, and Linux takes 131,071" in told
    assert "Hint: write it to a file that the program reads\n" in told


def test_an_absurd_number_of_ranks_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["-H", "a:2"]):
        assert main(["run", "-np", "1000000000", "--oversubscribe", *more, "--dry-run", "--", "true"]) == 2
        assert "Error: 1000000000 ranks are more than a job can have (250000)" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_more_ranks_than_slots_are_fine_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "-np", "5", "-H", "a:2,b:1", "--oversubscribe", "--launcher", "mpirun", "--dry-run", "recipe.py"]
    assert main(words) == 0
    assert "-H a:3,b:2" in capsys.readouterr().out


@pytest.mark.usefixtures("_here")
def test_what_is_printed_is_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--dry-run``, pasted into a shell, does what ``run`` does."""
    words = [
        "run",
        "-np",
        "2",
        "--launcher",
        "mpirun",
        "--env",
        "GREETING=hello  'you'",
        "--",
        "sh",
        "-c",
        'echo "$GREETING $0"',
        "$x y",
    ]
    assert main([*words[:5], "--dry-run", *words[5:]]) == 0
    line = capsys.readouterr().out
    pasted = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60)
    ran = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *words], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert pasted.stdout.count("hello  'you' $x y\n") == 2
    assert ran.stdout.count("hello  'you' $x y\n") == 2


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failed_program_is_a_failed_job_with_its_code(script: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    script = f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then {script}; fi; sleep 60'
    assert main(["run", "-np", "2", "--launcher", "mpirun", "--", "sh", "-c", script]) == code
    assert "Error: " in capfd.readouterr().err


@pytest.mark.usefixtures("_here")
def test_bare_ranks_are_not_said_to_have_never_started(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "--gloo", "--no-relay", "--", "sh", "-c", "exit 7"]) == 7
    assert "Error: the launcher ended with exit code 7\nHint: see its message above\n" in capfd.readouterr().err


#: Fails as ``hvdtrain train`` does, with last words: rank 1 at once if argv says so, the others when they are told to end.
FAILS = """
import os, signal, sys, time
from hvdtrain.launch.frames import words_line

def fail(*_):
    print("failing\\n", end="", flush=True)
    sys.stderr.write(words_line({"time": time.time(), "phase": "train", "error": "ValueError: mine", "exit_code": 5}))
    sys.stderr.flush()
    time.sleep(0.5)
    os._exit(5)

signal.signal(signal.SIGTERM, fail)
if sys.argv[1] == "before" and os.environ["HOROVOD_RANK"] == "1":
    fail()
print("ready\\n", end="", flush=True)
time.sleep(60)
"""

ENDS = {
    "before": (5, "rank 1 on {host} failed first in phase 'train': ValueError: mine"),
    "after": (130, "the job was ended by a signal (SIGINT)"),
}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("when", ENDS)
def test_a_signal_is_the_cause_unless_a_rank_had_failed_before(when: str) -> None:
    words = ["run", "-np", "2", "--gloo", "--grace", "4", "--", sys.executable, "-c", FAILS, when]
    running = subprocess.Popen([sys.executable, "-m", "hvdtrain", *words], stdout=-1, stderr=-1, text=True)
    assert running.stdout is not None
    awaited = {"before": "[0 {host}] failing\n", "after": "[1 {host}] ready\n"}[when].format(host=socket.gethostname())
    for line in running.stdout:
        if line == awaited:
            running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    code, message = ENDS[when]
    assert running.returncode == code, said
    assert f"Error: {message.format(host=socket.gethostname())}\n" in said
    assert ("ValueError" in said) == (when == "before")


#: how rank 0 fails -> whether Open MPI's box about it is all there is to know
ABORTS = {"c.Abort(3)": True, "print('ValueError: mine', file=sys.stderr, flush=True); c.Abort(3)": False}


@pytest.mark.parametrize("how", ABORTS)
def test_open_mpis_box_is_shown_only_if_no_rank_says_why(how: str, _here: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    program = f"import sys; from mpi4py import MPI; c = MPI.COMM_WORLD; c.barrier()\nif c.rank == 0: {how}\nc.barrier()"
    words = ["run", "-np", "2", "--launcher", "mpirun", "--log-dir", "logs", "--", sys.executable, "-c", program]
    assert main(words) == 3
    said = capfd.readouterr().err
    wrote = (_here / "logs/launcher").read_text()  # sometimes Open MPI loses the box and writes another line instead
    assert wrote
    assert ("MPI_ABORT was invoked" in said) == (ABORTS[how] and "MPI_ABORT was invoked" in wrote), said
    assert ("ORTE_ERROR_LOG" in said) == (ABORTS[how] and "ORTE_ERROR_LOG" in wrote), said


@pytest.mark.usefixtures("_here")
def test_a_rank_that_leaves_before_the_others_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os; from mpi4py import MPI; MPI.COMM_WORLD.rank and os._exit(0); MPI.COMM_WORLD.barrier()"
    assert main(["run", "-np", "2", "--launcher", "mpirun", "--", sys.executable, "-c", program]) != 0
    assert re.search(
        r"rank 1 on \S+ \(after \d+\.\d s\) ended with exit code 0 while the others went on\n", capfd.readouterr().err
    )


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("words", [("--log-dir", "logs"), ("-H", "localhost:2", "--include", "localhost:1")])
def test_what_only_the_relay_can_do_is_refused_without_it(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words, "--no-relay", "--dry-run", "--", "true"]) == 2
    assert "needs the relay, and --no-relay leaves it out" in capsys.readouterr().err


def test_a_run_directory_that_another_job_holds_is_left_as_it_is(_here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    with RunDir(_here / "run").claim():
        before = {path: path.read_text() for path in (_here / "run").rglob("*")}
        assert main(["run", "-np", "2", "recipe.py", "--run-dir", "run"]) == 2
        assert "the run directory run is in use by process " in capsys.readouterr().err
        assert {path: path.read_text() for path in (_here / "run").rglob("*")} == before


def test_a_job_that_is_refused_leaves_the_logs_of_another_one_as_they_are(
    _here: Path,  # noqa: PT019
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also when that one has only just begun, and no rank of it holds the run directory yet."""
    for option, words in (
        ("--run-dir", ["recipe.py", "--run-dir", "run"]),
        ("--log-dir", ["--log-dir", "run/logs", "--", "true"]),
    ):
        with rundir.held(_here / "run" / "logs", "folder for logs", ""):
            assert main(["run", "-np", "1", "--gloo", *words]) == 2
            assert [path.name for path in (_here / "run").rglob("*")] == ["logs", ".lock"]
        said = capsys.readouterr().err
        assert f"the folder for logs run/logs is in use by process {os.getpid()}" in said
        assert f"give another one: {option} DIR" in said


@pytest.mark.usefixtures("_here")
def test_an_empty_directory_of_the_users_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    assert main(["run", "-np", "1", "--gloo", "--dry-run", "recipe.py", "--run-dir", "mine"]) == 0
    assert main(["run", "-np", "9", "-H", "localhost:9", "--log-dir", "x", "--no-relay", "recipe.py", "--run-dir", "mine"]) == 2
    assert Path("mine").is_dir()


ASKS = {"run": ["-H", "node1:1,node2:1", "--launcher", "mpirun", "recipe.py"], "hosts": ["check", "--connect", "hosts"]}


@pytest.mark.parametrize(
    ("command", "number"),
    [("run", signal.SIGTERM), ("run", signal.SIGHUP), ("run", signal.SIGINT), ("hosts", signal.SIGTERM)],
)
def test_a_signal_while_hosts_are_asked_leaves_nothing_behind(
    command: str,
    number: signal.Signals,
    _here: Path,  # noqa: PT019
) -> None:
    ssh = _here / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\necho $$ > {_here}/pid.$$\nexec sleep 60\n")
    ssh.chmod(0o755)
    (_here / "tmp").mkdir()
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "TMPDIR": f"{_here}/tmp"}
    (_here / "hosts").write_text("node1:1\nnode2:1\n")
    (_here / "runs").mkdir()
    argv = [sys.executable, "-m", "hvdtrain", command, *ASKS[command]]
    running = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(pids := [path.read_text().strip() for path in _here.glob("pid.*")]) < 2 or "" in pids:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(number)
    _, said = running.communicate(timeout=5)
    assert running.returncode == 128 + number
    assert f"Error: ended by a signal ({number.name})\n" in said
    assert "Traceback" not in said
    assert [*(_here / "runs").iterdir(), *(_here / "tmp").iterdir()] == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_reader_that_has_stalled_does_not_keep_the_job_alive(number: signal.Signals, tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--gloo", "--", "sh", "-c", "echo $$ > pid; exec yes"]
    running = subprocess.Popen([sys.executable, "-m", "hvdtrain", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert running.stdout is not None
    while not running.stdout.readline().endswith(b"] y\n"):
        assert running.poll() is None
    pid = int((tmp_path / "pid").read_text())
    time.sleep(1)  # the buffers in between are full by then
    started = time.monotonic()
    running.send_signal(number)
    assert running.wait(timeout=10) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 5
    while linux.is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert time.monotonic() - started < 8
    running.stdout.close()


@pytest.mark.usefixtures("_here")
def test_a_reader_that_has_stalled_before_the_start_does_not_keep_us_alive() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x")
    os.set_blocking(writes, True)
    words = ["run", "-np", "1", "--gloo", "--", "true"]
    running = subprocess.Popen([sys.executable, "-m", "hvdtrain", *words], stdout=writes, stderr=writes)
    os.close(writes)
    time.sleep(1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=10) in (143, -signal.SIGTERM)  # the latter if that was too early
    os.close(reads)


ODD = {
    ("x" * 300 + ".py",): "cannot be looked at: File name too long",
    ("x" * 300,): "cannot be looked at: File name too long",
    ("--grace", "nan", "--", "true"): "'nan' is not a number of seconds",
    ("--env-file", "nul", "--", "true"): "nul:1: the value of A has a NUL byte in it",
}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("words", ODD, ids=lambda words: words[0][:20])
def test_odd_words_are_no_tracebacks(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path("nul").write_bytes(b"A=1\0 2\n")
    assert main(["run", "-np", "1", "--gloo", "--dry-run", *words]) == 2
    assert ODD[words] in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_where_no_temporary_file_can_be_made_that_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nope")
    assert main(["run", "-np", "1", "--gloo", "--", "true"]) == 2
    assert "Error: no folder for temporary files can be made: No such file or directory\n" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("more", [[], ["--no-relay"]])
def test_a_program_that_is_not_there_is_exit_code_127(more: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "--gloo", *more, "--", "./nosuch"]) == 127
    said = capfd.readouterr().err
    assert "cannot start ./nosuch: No such file or directory" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("_here")
def test_filters_choose_hosts_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "-H",
        "a:4,b:2,c:2",
        "--include",
        "a:1,3",
        "--include",
        "b",
        "--launcher",
        "mpirun",
        "--dry-run",
        "recipe.py",
    ]
    assert main(words) == 0
    line = capsys.readouterr().out
    assert "-np 4 -H a:2,b:2 " in line
    assert "--devices '1,3;' " in line


ELASTIC_REFUSED = {
    ("--min-np", "2"): "--min-np and --max-np need to know the hosts",
    ("--host-discovery-script", "nope.sh"): "host discovery script 'nope.sh' is not there or not executable",
    ("--host-discovery-script", "ok.sh", "--min-np", "4", "--max-np", "2"): "--max-np 2 is less than --min-np 4",
}


@pytest.mark.parametrize("words", ELASTIC_REFUSED)
def test_elastic_options_are_checked(words: tuple[str, ...], _here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    (_here / "ok.sh").write_text("#!/bin/sh\necho a:2\n")
    (_here / "ok.sh").chmod(0o755)
    assert main(["run", *words, "recipe.py"]) == 2
    assert ELASTIC_REFUSED[words] in capsys.readouterr().err


def test_an_elastic_job_is_horovodruns(_here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: PT019
    (_here / "ok.sh").write_text("#!/bin/sh\necho a:2\n")
    (_here / "ok.sh").chmod(0o755)
    assert main(["run", "--host-discovery-script", "ok.sh", "--min-np", "2", "--max-np", "4", "--dry-run", "recipe.py"]) == 0
    argv = argv_of(capsys.readouterr().out.splitlines()[-1])
    assert argv[1:9] == ["-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(_here / "ok.sh")]
    assert "-H" not in argv[: argv.index("relay")]


@pytest.mark.parametrize("name", ["127.0.0.5", "LocalHost", os.uname().nodename, os.uname().nodename.upper()])
def test_this_machine_by_any_of_its_names_is_a_local_job(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-H", f"{name}:1", "--launcher", "mpirun", "--", "echo", "hi"]) == 0
    assert capfd.readouterr().out == f"[0 {os.uname().nodename}] hi\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-restarts", "1", "--min-np", "5"], "--min-np 5 is more than the 2 ranks of the job"),
        (["--max-restarts", "1", "--max-np", "3"], "leave --max-np out"),
        (["--max-restarts", "-1"], "max-restarts"),
        (["--stop-timeout", "0"], "stop-timeout"),
    ],
)
def test_restarts_that_cannot_be_are_refused(words: list[str], says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "run", "-np", "2", *words, "--", "true"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr


def test_what_cannot_be_started_is_not_tried_again(tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--gloo", "--max-restarts", "2", "--", "./nosuch"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 127
    assert "restart" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_a_restart_ends_it_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--gloo", "--max-restarts", "3", "--", "sh", "-c", "exit 3"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", *words], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        while "failed first" not in running.stderr.readline():
            pass
        time.sleep(0.3)  # it waits for what the failed job still holds
        running.send_signal(number)
        said = running.stderr.read()
    assert running.returncode == 128 + number
    assert f"ended by a signal ({signal.Signals(number).name})" in said
    assert "restart" not in said
    assert not list(tmp_path.glob("hvdtrain-*"))
