"""What hosts are asked before a job starts, and what their answers mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.launch import Host, Ssh, probe, start_argv
from hvdtrain.launch.probe import Answer, differences, problems, read, second, ssh_argv

GOOD = {"host": "n", "python": "3.11.7", "package": "p", "cwd": True, "paths": {"r.py": "d"}, "launcher_resolves": True}

SSH_SAID = {
    "ssh: connect to host node1 port 12345: Connection timed out": "no answer on port 12345",
    "ssh: connect to host node1 port 12345: Connection refused": "nothing listens on port 12345",
    "al@node1: Permission denied (publickey).": "it does not accept our key",
    "Host key verification failed.": "its host key is not known, or has changed",
    "ssh: Could not resolve hostname node1: Name or service not known": "unknown host: the name does not resolve",
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 12345": (
        "it accepted the connection on port 12345 and closed it"
    ),
    "ssh: something nobody has seen": "ssh failed: ssh: something nobody has seen",
}


@pytest.mark.parametrize("said", SSH_SAID)
def test_each_way_ssh_fails_is_a_finding_of_its_own(said: str) -> None:
    answer = read(Host("node1", port=12345), 255, "", said)
    assert (answer.problem, answer.record) == (SSH_SAID[said], {})
    assert answer.hint


HINTS = {
    "Permission denied (publickey).": "ssh-copy-id -p 2222 al@node1, or name the key",
    "Host key verification failed.": "ssh-keyscan -p 2222 node1 >> ~/.ssh/known_hosts",
    "something nobody has seen": "try: ssh -p 2222 al@node1 true",
}


@pytest.mark.parametrize("said", HINTS)
def test_what_to_type_has_the_port_and_the_user(said: str) -> None:
    assert HINTS[said] in read(Host("node1", user="al", port=2222), 255, "", said).hint
    assert "-p" not in read(Host("node1"), 255, "", said).hint


NOT_READY = {
    (127, "sh: 1: exec: /env/bin/python: not found"): "Python is not there at the path it has here",
    (126, "sh: /env/bin/python: Permission denied"): "Python is not there at the path it has here",
    (
        2,
        "/env/bin/python: can't open file '/env/start.py': [Errno 2]",
    ): "hvdtrain is not installed there at the path it has here",
    (1, "SyntaxError: invalid syntax"): "the check failed there: SyntaxError: invalid syntax",
    (0, ""): "the check failed there: exit code 0",
}


@pytest.mark.parametrize("said", NOT_READY)
def test_a_host_without_what_it_needs_is_told_apart(said: tuple[int, str]) -> None:
    assert read(Host("node1"), said[0], "", said[1]).problem.startswith(NOT_READY[said])


def test_an_answer_is_found_behind_what_a_login_shell_prints() -> None:
    answer = read(Host("node1"), 0, f"Welcome to node1!\n\x1e{json.dumps(GOOD)}\n", "motd")
    assert (answer.problem, answer.record) == ("", GOOD)
    assert read(Host("node1"), 0, "Welcome\n\x1e{half", "").problem


def test_hosts_that_cannot_take_part_come_together_with_their_reasons() -> None:
    answers = [
        Answer("a", GOOD),
        Answer("b", problem="unknown host", hint="check"),
        Answer("c", {**GOOD, "cwd": False}),
        Answer("d", {**GOOD, "paths": {"r.py": ""}}),
    ]
    error = probe.error(problems(answers, "/w"), 4)
    assert error.message == (
        "3 of 4 hosts cannot take part\nb: unknown host\nc: the folder /w is not there\nd: r.py is not there (in /w)"
    )
    assert error.hint.startswith("check; make it, or share it between the hosts")


def test_what_differs_between_hosts_is_told() -> None:
    answers = [
        Answer("a", GOOD),
        Answer("b", {**GOOD, "python": "3.10.1"}),
        Answer("c", {**GOOD, "paths": {"r.py": "other"}, "launcher_resolves": False}),
        Answer("d", problem="down"),
    ]
    python, recipe, name = differences(answers)
    assert python == "Python differs on b (3.10.1) from that on a (3.11.7)"
    assert recipe == "the recipe differs on c from that on a"
    assert name.startswith("c cannot resolve this machine's name")
    assert differences([Answer("a", GOOD), Answer("b", GOOD)]) == []


def test_a_server_that_takes_one_connection_is_found_out() -> None:
    first = [Answer("a", GOOD), Answer("b", GOOD)]
    again = [Answer("a", GOOD), read(Host("b"), 255, "", "ssh: connect to host b port 22: Connection refused")]
    (found,) = second(first, again)
    assert found.host == "b"
    assert found.problem == "the first connection worked, the second did not: nothing listens on port 22"
    assert "sshd run with -d" in found.hint


def test_the_users_ssh_options_come_before_ours_and_are_kept_apart() -> None:
    ssh = Ssh(2222, "/k e y", ("-i", "key", "-o", "ConnectTimeout=5"))
    argv = ssh_argv(Host("node1", 1, "al", 99), ssh, "true")
    assert argv == [
        *("ssh", "-p", "2222", "-i", "/k e y", "-i", "key", "-o", "ConnectTimeout=5"),
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no", "al@node1", "true"),
    ]
    assert ssh_argv(Host("node1", 1, "", 99), Ssh(), "true")[:3] == ["ssh", "-p", "99"]
    assert not any("StrictHostKeyChecking" in word for word in argv)


def test_this_machine_answers_without_ssh(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("x")
    (answer,) = probe.ask([Host("localhost")], Ssh(), start_argv(sys.executable), str(tmp_path), ["r.py", "gone.py"])
    assert answer.problem == ""
    assert answer.record["cwd"]
    assert [bool(answer.record["paths"][path]) for path in ("r.py", "gone.py")] == [True, False]
    assert any(each.name == "lo" for each in answer.interfaces)
    assert [each.problem for each in problems([answer], str(tmp_path))] == [f"gone.py is not there (in {tmp_path})"]


@pytest.fixture
def stub_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``ssh`` that runs the command here, through a shell, as the real one does there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    refuse = 'echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255'
    script = f'for last; do :; done\ncase "$*" in *down*) {refuse};; esac\nexec /bin/sh -c "$last"\n'
    (folder / "ssh").write_text(f"#!/bin/sh\n{script}")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.usefixtures("stub_ssh")
def test_the_question_survives_the_remote_shell(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s $HOME; a "b"'
    odd.mkdir()
    answers = probe.ask([Host("far-away"), Host("down")], Ssh(), start_argv(sys.executable), str(odd), ["x y'z"])
    assert [answer.problem for answer in answers] == ["", "nothing listens on port 22"]
    assert answers[0].record["cwd"]
    assert answers[0].record["paths"] == {"x y'z": ""}


def test_what_runs_on_the_host_that_is_asked_needs_the_standard_library_only() -> None:
    question = json.dumps({"cwd": ".", "paths": [], "launcher": "localhost"})
    done = subprocess.run([*start_argv(sys.executable), "this_host", question], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert read(Host("n"), 0, done.stdout, "").record["python"] == ".".join(map(str, sys.version_info[:3]))
