"""``hvdtrain hosts`` as typed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.launch.dialects import DIALECTS


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=3\nnode2:1\nnode[3-3] slots=2\n")
    return str(path)


def test_show_is_the_resolved_map(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "show", hosts]) == 0
    text = capsys.readouterr().out
    assert f"6 ranks on 3 hosts ({hosts})" in text
    assert [line.split() for line in text.splitlines() if " node" in line and "rank" not in line] == [
        ["0", "node1", "0", "3", "0", "0", "0"],
        ["1", "node1", "1", "3", "0", "0", "1"],
        ["2", "node1", "2", "3", "0", "0", "2"],
        ["3", "node2", "0", "1", "1", "1", "0"],
        ["4", "node3", "0", "2", "2", "2", "0"],
        ["5", "node3", "1", "2", "2", "1", "1"],
    ]
    assert "not used" not in text


def test_show_tells_what_gets_no_rank(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "show", hosts, "--exclude", "node1:0", "-np", "3"]) == 0
    assert capsys.readouterr().out.endswith("\nnot used: 1 of 3 slots of node1, node3\n")


def test_show_as_json_with_filters(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "show", hosts, "--include", "node1:1-2", "--include", "node3", "-np", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["unused"] == {"node1": 1, "node2": 1, "node3": 1}
    assert [(row["rank"], row["host"], row["local_rank"], row["device"]) for row in shown["ranks"]] == [
        (0, "node1", 0, "1"),
        (1, "node1", 1, "2"),
        (2, "node3", 0, "0"),
    ]


def test_visible_devices_of_this_machine_are_mapped_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert main(["hosts", "show", "-H", "localhost:2", "--json"]) == 0
    assert [row["device"] for row in json.loads(capsys.readouterr().out)["ranks"]] == ["4", "5"]
    assert main(["hosts", "show", "-H", "localhost:4", "--json"]) == 2
    assert "4 ranks on localhost, which offers 2 GPUs (4, 5)" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["hosts", "show", "-H", "localhost:4", "--json"]) == 0
    assert {row["device"] for row in json.loads(capsys.readouterr().out)["ranks"]} == {"cpu"}


def test_chosen_slots_of_this_machine_count_what_cuda_visible_devices_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert main(["hosts", "show", "-H", "localhost:3,b:2", "--exclude", "localhost:0", "--exclude", "b:0", "--json"]) == 0
    assert [row["device"] for row in json.loads(capsys.readouterr().out)["ranks"]] == ["5", "7", "1"]
    assert main(["hosts", "show", "-H", "localhost:4", "--include", "localhost:3"]) == 2
    assert "localhost: device 3 was chosen, but CUDA_VISIBLE_DEVICES shows 3: 4, 5, 7" in capsys.readouterr().err


def test_check_lists_every_mistake_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=four\nb\nc;d\n")
    assert main(["hosts", "check", str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{path}:1: 'slots' must be a positive integer, got 'slots=four'\n"
        "    a slots=four\n"
        "    Hint: write 'a slots=4'\n"
        f"{path}:3: host name 'c;d' contains ';'\n"
        "    Hint: a host name has letters, digits, '.', '_' and '-', and begins and ends with a letter or a digit\n"
        "2 mistakes\n"
    )
    assert main(["hosts", "check", str(path), "--json"]) == 1
    assert [each["line"] for each in json.loads(capsys.readouterr().out)["mistakes"]] == [1, 3]


def test_check_of_a_good_file_is_fine_unless_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\nb\n")
    assert main(["hosts", "check", str(path)]) == 0
    assert (
        capsys.readouterr().out
        == f"warning: {path}:2: 'b' has no slots, taken as 1; write 'b slots=4' or 'b:4'\nfine: 2 hosts, 3 slots\n"
    )
    assert main(["hosts", "check", str(path), "--strict"]) == 1


def test_check_connect_finds_a_machine_that_has_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = socket.gethostname()
    assert main(["hosts", "check", "--connect", "-H", f"localhost:1,{name}:1", "--json"]) == 1
    (mistake,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert (mistake["where"], mistake["problem"]) == (name, f"is the same machine as localhost ({name})")


CONVERTED = {
    "horovod": "node1:3,node2:1,node3:2\n",
    "mpich": "node1:3\nnode2:1\nnode3:2\n",
    "openmpi": "node1 slots=3\nnode2 slots=1\nnode3 slots=2\n",
    "slurm": "SLURM_JOB_NODELIST=node[1-3]\nSLURM_TASKS_PER_NODE=3,1,2\n",
    "lsf": "node1 3 node2 1 node3 2\n",
    "pbs": "node1\nnode1\nnode1\nnode2\nnode3\nnode3\n",
}


@pytest.mark.parametrize("dialect", CONVERTED)
def test_convert(dialect: str, hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "convert", hosts, "--to", dialect]) == 0
    assert capsys.readouterr().out == CONVERTED[dialect]


def test_convert_does_not_drop_a_choice_of_devices(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    for dialect in DIALECTS:
        assert main(["hosts", "convert", hosts, "--exclude", "node3:0", "--to", dialect]) == 2
        assert f"the {dialect} dialect cannot say which devices (host node3)" in capsys.readouterr().err
    assert main(["hosts", "convert", hosts, "--exclude", "node1:2", "--to", "mpich"]) == 0  # the first two are what it says
    assert capsys.readouterr().out == "node1:2\nnode2:1\nnode3:2\n"


def test_convert_leaves_max_slots_out_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=2 max_slots=4\nb slots=1 max_slots=4\n")
    for dialect, wrote in {"mpich": "a:2\nb:1\n", "openmpi": "a slots=2 max_slots=4\nb slots=1 max_slots=4\n"}.items():
        assert main(["hosts", "convert", str(tmp_path / "hosts"), "--to", dialect]) == 0
        said = capsys.readouterr()
        assert said.out == wrote
        warning = "Warning: the mpich dialect has no max_slots: left out (host a and 1 more)\n"
        assert said.err == (warning if dialect == "mpich" else "")


def test_hosts_come_from_the_command_line_or_the_batch_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["hosts", "convert", "-H", "b:3", "--to", "horovod"]) == 0
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    assert main(["hosts", "convert", "--to", "horovod"]) == 0
    assert capsys.readouterr().out == "b:3\nc1:4,c2:4\n"


@pytest.mark.parametrize(
    "shell", ['"$@" <(sleep 0.1; echo a:2; echo b:1)', "echo a:2,b:1 | '$@' -", "echo a:2,b:1 | '$@' /dev/stdin"]
)
def test_hosts_come_through_a_pipe(shell: str) -> None:
    words = [
        "bash",
        "-c",
        shell.replace("'$@'", '"$@"'),
        "bash",
        sys.executable,
        "-m",
        "hvdtrain",
        "hosts",
        "convert",
        "--to",
        "horovod",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("a:2,b:1\n", "")


REFUSED = {
    ("show",): "no hosts: no hostfile, no -H, and this shell is in no Slurm, PBS or LSF job",
    ("check", "nope"): "hostfile 'nope' does not exist",
    ("convert", "nope", "-H", "a:1", "--to", "pbs"): "both -H and a hostfile are given",
    ("show", "-H", "a:1", "-np", "2"): "2 processes requested, '-H a:1' offers 1 slot (a: 1)",
    ("show", "-H", "a:1", "-np", "1000000000"): "1000000000 ranks are more than a job can have (250000)",
    ("check", "-H", "a", "--exclude", "b"): "--exclude b: there is no host 'b'",
    ("convert", "-H", "al@a:1", "--to", "mpich"): "the mpich dialect cannot say user (host a)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_usage_errors(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", *words]) == 2
    assert f"Error: {REFUSED[words]}" in capsys.readouterr().err


def test_it_needs_no_framework_no_mpi_and_no_horovod() -> None:
    code = (
        "import sys\nfrom hvdtrain.cli import main\nmain(['hosts', 'show', '-H', 'a:2'])\n"
        "print([m for m in ('torch', 'tensorflow', 'keras', 'mpi4py', 'horovod', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
