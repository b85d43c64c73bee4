"""The program that stands between a launcher and ssh, run with a stand-in for ssh."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.launch import Command, Job, Ssh, process, ssh

OPTIONS = Ssh(2222, "/k e y", ("-o", "ProxyCommand=a 'b'"))


def stub(folder: Path, text: str) -> str:
    (folder / "real-ssh").write_text(f"#!{sys.executable}\n{text}\n")
    (folder / "real-ssh").chmod(0o755)
    return str(folder / "real-ssh")


def job(folder: Path) -> Job:
    return Job(("x",), (), 2, ssh=OPTIONS, launch_dir=str(folder / "own"))


def test_the_users_options_come_first_and_horovods_word_on_host_keys_is_dropped(tmp_path: Path) -> None:
    path, text = ssh.for_horovodrun(job(tmp_path), stub(tmp_path, "import sys; print(sys.argv[1:])"))
    process.write_files({path: text})
    words = [
        "-o",
        "PasswordAuthentication=no",
        "-o",
        "StrictHostKeyChecking=no",
        "node2",
        "echo 'a  b' StrictHostKeyChecking=no",
    ]
    done = subprocess.run([path, *words], capture_output=True, text=True, check=True)
    ours = [*OPTIONS.argv(), "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    assert done.stdout == f"{[*ours, *words[:3], 'BatchMode=yes', *words[4:]]}\n"


def test_a_lost_connection_ends_an_mpirun_that_does_not_notice(tmp_path: Path) -> None:
    """Politely, and by force if it takes no notice of that either, as Hydra does."""
    path, text = ssh.for_hydra(Job(("x",), (), 2, launch_dir=str(tmp_path / "own")), stub(tmp_path, "raise SystemExit(255)"))
    process.write_files({path: text})
    started = time.monotonic()
    done = subprocess.run(["/bin/sh", "-c", f"trap '' TERM; {path} node2 & while :; do sleep 1; done"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert time.monotonic() - started < 15


def test_a_program_in_the_printed_line_can_be_executed(tmp_path: Path) -> None:
    path = str(tmp_path / "own" / "hello")
    line = Command((path,), files={path: "#!/bin/sh\necho hello\n"}).script({})
    assert subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True).stdout == "hello\n"
