"""Every launcher that a machine without a batch system can have, for real, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.mpis import OTHERS, ROOT, python_with

pytestmark = pytest.mark.ranks

#: launcher -> (MPI, options)
LAUNCHERS = {
    "openmpi4": ("", ["--launcher", "mpirun"]),
    "openmpi5": ("openmpi5", ["--launcher", "mpirun"]),
    "mpich": ("mpich", ["--launcher", "mpirun"]),
    "intel": ("intel", ["--launcher", "mpirun"]),
    "horovodrun-mpi": ("", ["--launcher", "horovodrun"]),
    "horovodrun-gloo": ("", ["--launcher", "horovodrun", "--gloo"]),
    "local": ("", ["--gloo"]),
}

#: What each rank prints about itself, as one line of JSON.
REPORT = """
import json, os, sys
names = json.loads(os.environ["NAMES"])
rank = next(os.environ[n] for n in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ)
import only_on_pythonpath
print(json.dumps({"rank": int(rank), "argv": sys.argv[1:], "env": {n: os.environ.get(n) for n in names}}) + "\\n", end="")
"""


def hvdtrain(launcher: str, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    mpi, options = LAUNCHERS[launcher]
    python = python_with(mpi) if mpi else sys.executable
    paths = os.pathsep.join(filter(None, [str(cwd), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [python, "-m", "hvdtrain", "run", "-np", "2", *options, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip


def python_of(launcher: str) -> str:
    return python_with(LAUNCHERS[launcher][0]) if LAUNCHERS[launcher][0] else sys.executable


def carrying(marker: str) -> list[str]:
    """Command lines of live processes whose environment holds the marker: ranks and their children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes() and folder.name != str(os.getpid()):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if line]


def gone(marker: str, within_s: float = 15) -> list[str]:
    deadline = time.monotonic() + within_s
    while carrying(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    return carrying(marker)


HARD = ["--np", "3", "-h", "", "a b", "$HOME", '"quote"', "it's", "new\nline", "ünïcode", "*", "--", "\\", "`id`", "-x"]
#: what launchers act on, also behind the program's name
HARD += [":", "--map-by", "x", "--mca", "plm", "x", "--tune", "/nope", "--configfile", "/nope", "@/nope", "=", "==", "A=1"]
VALUES = {"SPACES": " two  words ", "QUOTES": 'it\'s "q" $HOME `id`;|&', "LINES": "one\ntwo", "UNI": "ünï"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_arguments_and_environment_arrive_unchanged_at_every_rank(launcher: str, tmp_path: Path) -> None:
    """Also PYTHONPATH; and an environment with shell functions and odd names does no harm."""
    (tmp_path / "only_on_pythonpath.py").write_text("")
    (tmp_path / "report.py").write_text(REPORT)
    names = [*VALUES, "NOT_ASKED_FOR", "GIVEN"]
    env = {**VALUES, "NOT_ASKED_FOR": "1", "NAMES": json.dumps(names), "FOO.BAR": "1", "BASH_FUNC_mod%%": "() { echo 'a; b'\n}"}
    asked = [word for name in [*VALUES, "NAMES"] for word in ("--env", name)]
    running = hvdtrain(
        launcher, *asked, "--env", "GIVEN=a=b 'c'", "--", python_of(launcher), "report.py", *HARD, cwd=tmp_path, env=env
    )
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, out + err
    reports = [json.loads(line.partition("] ")[2]) for line in out.splitlines() if line.startswith("[") and '"rank"' in line]
    assert sorted(report["rank"] for report in reports) == [0, 1], out + err
    for report in reports:
        assert report["argv"] == HARD
        assert {name: report["env"][name] for name in VALUES} == VALUES
        assert report["env"]["GIVEN"] == "a=b 'c'"


#: A shell that was in a Slurm job and in a rank of Open MPI's, with neither ssh nor home.
STALE = {
    **{"SLURM_JOB_ID": "5", "SLURM_JOBID": "5", "SLURM_NODELIST": "gone", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "2"},
    **{"OMPI_UNIVERSE_SIZE": "7", "OMPI_MCA_ess": "^singleton", "OMPI_MCA_orte_ess_num_procs": "1", "PMIX_RANK": "0"},
    **{"OMPI_MCA_orte_xml_output": "1", "OMPI_MCA_orte_launch": "1", "PRTE_LAUNCHED": "1", "PMI_FD": "9"},
    **{"PATH": "/nowhere", "HOME": ""},
}


@pytest.mark.parametrize("launcher", [name for name, (mpi, _) in LAUNCHERS.items() if name.startswith("openmpi4") or mpi])
def test_the_ranks_meet_over_the_mpi_whose_mpirun_started_them(launcher: str, tmp_path: Path) -> None:
    program = (
        "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(c.rank + 1), MPI.Get_library_version().splitlines()[0])"
    )
    running = hvdtrain(launcher, "-H", "localhost:2", "--", python_of(launcher), "-c", program, cwd=tmp_path, env=STALE)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, out + err
    library = OTHERS[LAUNCHERS[launcher][0]][1] if LAUNCHERS[launcher][0] else "Open MPI v4"
    said = [line.partition("] ")[2] for line in out.splitlines() if line.startswith("[")]
    assert len(said) == 2
    assert all(text.startswith("3 ") and library in text for text in said), out


@pytest.mark.parametrize("outer", ["openmpi4", "local"])
def test_a_job_that_is_started_by_a_rank_is_a_job_of_its_own(outer: str, tmp_path: Path) -> None:
    program = "import os; from mpi4py import MPI; print(MPI.COMM_WORLD.size, os.environ.get('HOROVOD_CONTROLLER'))"
    inner = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--no-prefix", "--", sys.executable, "-c", program]
    running = hvdtrain(outer, "-np", "1", "--no-prefix", "--", *inner, cwd=tmp_path)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "2 None\n2 None\n"), out + err


RANK = 'for n in HOROVOD_RANK OMPI_COMM_WORLD_RANK PMI_RANK; do eval v=\\$$n; [ -n "$v" ] && break; done; '


#: horovodrun takes 5 s to import all frameworks before it starts anything: one way each is enough for it.
FAILURES = [("exit 7", 7, "exit code 7"), ("kill -9 $$", 137, "killed by signal 9")]
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(
    ("launcher", "how", "code", "says"),
    [(name, *each) for name in LAUNCHERS for each in FAILURES if not name.startswith("horovodrun") or each[1] == 137],
)
def test_a_failed_rank_fails_the_job_with_its_code_and_ends_the_others(
    launcher: str, how: str, code: int, says: str, tmp_path: Path
) -> None:
    marker = f"M{os.getpid()}x{time.monotonic_ns()}"
    script = f"{RANK}if [ $v = 1 ]; then echo at step 3; {how}; fi; sleep 100 & wait"
    running = hvdtrain(launcher, "--env", f"MARKER={marker}", "--", "sh", "-c", script, cwd=tmp_path)
    started = time.monotonic()
    out, err = running.communicate(timeout=60)
    assert running.returncode == code, out + err
    assert f"rank 1 on {os.uname().nodename} failed first: {says}" in err
    assert gone(marker) == []
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("launcher", "number"),
    [(name, each) for name in LAUNCHERS for each in ENDS if not name.startswith("horovodrun") or each != signal.SIGTERM],
)
def test_when_the_job_is_ended_no_rank_and_no_loader_worker_is_left(
    launcher: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Two ranks with two children each, as data loaders have them; also when ``hvdtrain run`` itself is killed."""
    marker = f"M{os.getpid()}x{time.monotonic_ns()}"
    script = "sleep 1000 & sleep 1000 & echo ready; wait"
    running = hvdtrain(launcher, "--env", f"MARKER={marker}", "--", "sh", "-c", script, cwd=tmp_path)
    assert running.stdout is not None
    for _ in range(2):
        while "ready" not in (line := running.stdout.readline()):
            assert line, "ended before it began"
    started = time.monotonic()
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert gone(marker) == []
    assert time.monotonic() - started < 15
    if number != signal.SIGKILL:
        assert running.returncode == 128 + number
        assert "Error: the job was ended by a signal" in err


def start_two(launcher: str, marker: str, cwd: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A job of two ranks that wait, and its keepers and relays."""
    running = hvdtrain(launcher, "--env", f"MARKER={marker}", "--", "sh", "-c", "sleep 1000 & echo ready; wait", cwd=cwd)
    assert running.stdout is not None
    for _ in range(2):
        while "ready" not in (line := running.stdout.readline()):
            assert line, "ended before it began"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-S", b"-E"] and words[4] == b"relay" and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    assert len(found) == 4
    return running, found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("launcher", "number", "code", "says"),
    [
        ("mpich", signal.SIGTERM, 143, "it was told to end (SIGTERM), and not by hvdtrain run"),
        ("intel", signal.SIGKILL, 137, "its relay was killed by signal 9 (SIGKILL)"),
        ("local", signal.SIGTERM, 143, "it was told to end (SIGTERM), and not by hvdtrain run"),
    ],
)
def test_a_signal_of_somebody_elses_to_a_relay_ends_the_job_and_names_the_rank(
    launcher: str, number: signal.Signals, code: int, says: str, tmp_path: Path
) -> None:
    """MPICH's and Intel MPI's launchers do not mind: there the job would wait for that rank without an end."""
    marker = f"M{os.getpid()}x{time.monotonic_ns()}"
    running, relays = start_two(launcher, marker, tmp_path)
    os.kill(next(pid for pid in relays if parent(pid) not in relays), number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code
    assert re.search(rf"Error: rank [01] on \S+ failed first: {re.escape(says)}", err), err
    assert gone(marker) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("launcher", ["openmpi4", "mpich", "local"])
def test_a_job_whose_relays_are_stopped_ends_all_the_same(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    marker = f"M{os.getpid()}x{time.monotonic_ns()}"
    running, relays = start_two(launcher, marker, tmp_path)
    for pid in relays:
        if parent(pid) in relays or launcher != "mpich":  # it waits 8 s for a stopped keeper
            os.kill(pid, signal.SIGSTOP)
    running.send_signal(number)
    running.communicate(timeout=30)
    assert gone(marker) == []


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "horovodrun-gloo"])
def test_a_secret_reaches_the_ranks_and_is_on_no_command_line(launcher: str, tmp_path: Path) -> None:
    secret = f"hunter{time.monotonic_ns()}"
    running = hvdtrain(
        launcher,
        "--env",
        "MY_TOKEN",
        "--",
        "sh",
        "-c",
        "echo ${#MY_TOKEN} ready; sleep 3",
        cwd=tmp_path,
        env={"MY_TOKEN": secret},
    )
    assert running.stdout is not None
    seen = ""
    while seen.count("ready") < 2:
        line = running.stdout.readline()
        assert line
        seen += line
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    out, err = running.communicate(timeout=60)
    assert f"{len(secret)} ready" in seen
    assert not any(secret.encode() in line for line in lines)
    assert secret not in seen + out + err


def test_gloo_with_horovodrun_refuses_a_secret_rather_than_show_it(tmp_path: Path) -> None:
    running = hvdtrain("horovodrun-gloo", "--env", "MY_TOKEN", "--", "true", cwd=tmp_path, env={"MY_TOKEN": "hunter2"})
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert "horovodrun --gloo would show the secret MY_TOKEN on command lines" in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize("launcher", ["openmpi4", "mpich", "horovodrun-gloo", "local"])
def test_two_jobs_at_once_do_not_collide(launcher: str, tmp_path: Path) -> None:
    both = [hvdtrain(launcher, "--", "sh", "-c", "echo hi; sleep 1", cwd=tmp_path) for _ in range(2)]
    for running in both:
        out, err = running.communicate(timeout=120)
        assert running.returncode == 0, out + err
        assert out.count("hi\n") == 2


def test_every_line_of_every_rank_is_whole_and_in_its_file(tmp_path: Path) -> None:
    """4 ranks write 1000 lines of 200 characters in pieces, to both streams."""
    program = (
        "import os\n"
        "for n in range(1000):\n"
        "    text = (f'{os.environ[\"OMPI_COMM_WORLD_RANK\"]} {n:04} ' + 'x' * 200)[:199] + '\\n'\n"
        "    for at in range(0, 200, 67): os.write(1 + n % 2, text[at:at + 67].encode())\n"
    )
    (tmp_path / "write.py").write_text(program)
    words = ["run", "-np", "4", "--launcher", "mpirun", "--log-dir", "logs", "--", sys.executable, "write.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for number, text in enumerate((done.stdout, done.stderr)):
        lines = [line.partition("] ")[2] for line in text.splitlines() if line.startswith("[")]
        assert len(lines) == 2000
        for rank in range(4):
            mine = [line for line in lines if line.startswith(f"{rank} ")]
            assert mine == [f"{rank} {n:04} ".ljust(199, "x") for n in range(1000) if n % 2 == number]
            stream = "stdout" if number == 0 else "stderr"
            assert (tmp_path / "logs" / f"rank-{rank}" / stream).read_text().splitlines() == mine


@pytest.mark.parametrize("mpi", ["openmpi4", *OTHERS])
def test_short_lines_of_ranks_that_write_fast_all_arrive_whole(mpi: str, tmp_path: Path) -> None:
    """Open MPI 4 puts a tag before each, and has no room for many of them; Intel's launcher mixes the ranks' text at any byte."""
    python = sys.executable if mpi == "openmpi4" else python_with(mpi)
    words = ["run", "-np", "2", "-H", "localhost:2", "--launcher", "mpirun", "--", "seq", "1", "10000"]
    done = subprocess.run(
        [python, "-m", "hvdtrain", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    for rank in range(2):
        mine = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith(f"[{rank} ")]
        assert mine == [str(number) for number in range(1, 10001)]
    assert len(done.stdout.splitlines()) == 20000


def test_quiet_ranks_shows_rank_0_alone_and_files_hold_all(tmp_path: Path) -> None:
    words = [
        "run",
        "-np",
        "2",
        "--launcher",
        "mpirun",
        "--quiet-ranks",
        "--log-dir",
        "logs",
        "--",
        "sh",
        "-c",
        "echo hi from $OMPI_COMM_WORLD_RANK",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"[0 {os.uname().nodename}] hi from 0\n"
    assert (tmp_path / "logs" / "rank-1" / "stdout").read_text() == "hi from 1\n"


@pytest.mark.parametrize("launcher", ["openmpi4", "horovodrun-gloo"])
def test_prefix_and_timestamps_are_honoured_alike(launcher: str, tmp_path: Path) -> None:
    out, _ = hvdtrain(launcher, "--no-prefix", "--", "echo", "hi", cwd=tmp_path).communicate(timeout=60)
    assert [line for line in out.splitlines() if "hi" in line] == ["hi", "hi"]
    out, _ = hvdtrain(launcher, "--timestamps", "--", "echo", "hi", cwd=tmp_path).communicate(timeout=60)
    lines = [line for line in out.splitlines() if line.endswith("hi")]
    assert len(lines) == 2
    assert all(line[2] == line[5] == ":" and line[8:10] == " [" for line in lines)


def test_out_of_memory_on_one_rank_ends_the_job_and_is_the_cause_told(tmp_path: Path) -> None:
    program = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': bytearray(1 << 62)\ntime.sleep(100)\n"
    (tmp_path / "big.py").write_text(program)
    started = time.monotonic()
    _, err = hvdtrain("openmpi4", "--", sys.executable, "big.py", cwd=tmp_path).communicate(timeout=60)
    assert time.monotonic() - started < 15
    assert "rank 1 on " in err
    assert "failed first: exit code 1: MemoryError" in err
