"""Every builder against a golden file. To write them anew after a deliberate change: UPDATE_GOLDEN=1 pytest ..."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, Elastic, Host, Job, Launcher, Ssh, fit, hostfile, local_hosts, place, relay
from hvdtrain.launch.horovodrun import Horovodrun
from hvdtrain.launch.hydra import Hydra
from hvdtrain.launch.jsrun import Jsrun
from hvdtrain.launch.local import Local
from hvdtrain.launch.mpi import Mpi, parse_version
from hvdtrain.launch.mpirun import OpenMpi
from hvdtrain.launch.srun import Srun

GOLDEN = Path(__file__).parent / "golden"
BASE = {"PATH": "/opt/env/bin:/usr/bin", "HOME": "/home/al", "PYTHONPATH": "/src"}
ENV = {"PATH": BASE["PATH"], "PYTHONPATH": "/src", "OMP_NUM_THREADS": "1", "NOTE": 'it\'s a "b" $c'}
ARGV = ("/opt/env/bin/python", "-m", "hvdtrain", "train", "a recipe.py", "--run-dir", "runs/r", "--set", "note='$HOME'", "")

UNEQUAL = (Host("node1", 3), Host("node2", 1))
LOCAL = (Host("localhost", 2),)

OMPI4 = Mpi("openmpi", (4, 1, 8), "/opt/env/bin/mpirun", "/opt/env")
OMPI4_SYSTEM = Mpi("openmpi", (4, 1, 4), "/usr/bin/mpirun", "/usr")
OMPI5 = Mpi("openmpi", (5, 0, 11), "/opt/env/bin/mpirun", "/opt/env")


def job(hosts: tuple[Host, ...] = UNEQUAL, **more: object) -> Job:
    facts = {"cwd": "/home/al/folder", "launch_dir": "/tmp/own", **more}
    return Job(ARGV, hosts, sum(host.slots for host in hosts), ENV, **facts)  # type: ignore[arg-type]


def horovodrun(mpi: Mpi | None = OMPI4) -> Horovodrun:
    return Horovodrun("/opt/env/bin/horovodrun", mpi, tuple(BASE.items()), "/usr/bin/ssh")


SSH = Ssh(2222, "/keys/id", ())
OPTIONS = Ssh(2222, "/keys/id", ("-o", "ConnectTimeout=5"))
MPICH = Mpi("mpich", (5, 0, 2), "/opt/env/bin/mpirun", "/opt/env")
INTEL = Mpi("intel", (2021, 18), "/opt/intel/bin/mpirun", "/opt/intel")
START = ("/opt/env/bin/python", "-S", "-E", "/pkg/start.py")
EQUAL = (Host("node01", 2), Host("node02", 2))
MANY = tuple(Host(f"node{number:03}", 8) for number in range(300))

CASES: dict[str, tuple[Launcher, Job]] = {
    "horovodrun-mpi-local": (horovodrun(), job(LOCAL)),
    "horovodrun-mpi": (horovodrun(), job(nics=("eth0",), ssh=OPTIONS)),
    "horovodrun-mpi5": (horovodrun(OMPI5), job()),
    "horovodrun-gloo": (horovodrun(None), job(controller="gloo", nics=("eth0", "eth1"), ssh=SSH)),
    "horovodrun-elastic": (
        horovodrun(None),
        job(controller="gloo", elastic=Elastic(2, 8, "./discover.sh"), launcher_args=("--reset-limit", "3")),
    ),
    "openmpi4-local": (OpenMpi(OMPI4, root=True), job(LOCAL)),
    "openmpi4": (OpenMpi(OMPI4), job(nics=("eth0",), ssh=OPTIONS, launcher_args=("--mca", "pml", "ucx"))),
    "openmpi4-system": (OpenMpi(OMPI4_SYSTEM), job()),
    "openmpi4-fqdn": (OpenMpi(OMPI4), job((Host("a.x.svc", 1), Host("a.y.svc", 1)))),
    "openmpi4-users": (OpenMpi(OMPI4), job((Host("node1", 2, "al"), Host("node2", 2, "bo")))),
    "openmpi4-many": (OpenMpi(OMPI4), job(MANY)),
    "mpich-local": (Hydra(MPICH, "/usr/bin/ssh"), job(LOCAL)),
    "mpich": (Hydra(MPICH, "/usr/bin/ssh"), job(nics=("eth0",), ssh=OPTIONS)),
    "mpich-users": (Hydra(MPICH), job((Host("node1", 2, "al"), Host("node2", 2, "bo")))),
    "intel": (Hydra(INTEL, "/usr/bin/ssh"), job(nics=("eth0",), ssh=OPTIONS)),
    "intel-many": (Hydra(INTEL, "/usr/bin/ssh"), job(MANY[:20])),
    "srun-equal": (Srun("/usr/bin/srun", "pmix"), job(EQUAL, nics=("eth0",))),
    "srun-in-a-step": (Srun("/usr/bin/srun", "pmix", overlap=True), job(EQUAL)),
    "srun-unequal": (Srun("/usr/bin/srun"), job()),
    "jsrun": (Jsrun("/usr/bin/jsrun", ("node01", "node02")), job(EQUAL)),
    "jsrun-unequal": (Jsrun("/usr/bin/jsrun", ("node1", "node2")), job()),
    "jsrun-some": (Jsrun("/usr/bin/jsrun", ("node01", "node02", "node03")), job(EQUAL)),
    "horovodrun-gloo-relay": (
        horovodrun(None),
        relay.wrap(job(controller="gloo", cwd="/home/al/a folder", elastic=Elastic(2, 8, "/find it.sh")), start=START),
    ),
    "local": (Local(START), job(LOCAL, controller="gloo")),
    "openmpi4-relay": (OpenMpi(OMPI4), relay.wrap(job(nics=("eth0",)), start=START)),
    "openmpi4-grace": (OpenMpi(OMPI4), relay.wrap(job(LOCAL, grace_s=10.0), start=START)),
    "openmpi5-relay": (OpenMpi(OMPI5), relay.wrap(job(), start=START)),
    "openmpi5": (OpenMpi(OMPI5, root=True), job(nics=("eth0",), ssh=OPTIONS)),
}


def shown(command: Command) -> str:
    """A golden file: the shell line with a word a line, so that a change is easy to see in a diff."""
    line = command.shell(BASE)
    files = command.script(BASE).removesuffix(line)
    if len(files) > 2000:
        files = f"{files[:200]}\n... {len(files)} characters\n"
    words = [re.sub(r"^(\w+)=\$(\w+)$", r'\1="$\2"', word) for word in shlex.split(line)]
    return files + " \\\n  ".join(word if '="$' in word else shlex.quote(word) for word in words) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_command_is_the_golden_one(name: str) -> None:
    launcher, the_job = CASES[name]
    text = shown(launcher.command(the_job))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_there_is_no_golden_file_that_nothing_compares() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_printed_line_pasted_into_a_shell_is_the_same_argv_and_environment(name: str, tmp_path: Path) -> None:
    launcher, the_job = CASES[name]
    command = launcher.command(the_job)
    show = tmp_path / "show"
    show.write_text(f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], sorted(os.environ.items()))\n")
    show.chmod(0o755)
    stand_in = Command((str(show), *command.argv[1:]), command.env, command.inherit)
    pasted = subprocess.run(["/bin/sh", "-c", stand_in.shell(BASE)], env=BASE, capture_output=True, text=True, check=True)
    direct = subprocess.run(stand_in.argv, env=stand_in.environment(BASE), capture_output=True, text=True, check=True)
    drop = "('PWD', "  # a shell sets this one itself
    assert [part for part in pasted.stdout.split("), ") if drop not in part] == [
        part for part in direct.stdout.split("), ") if drop not in part
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_arguments_of_the_program_come_last_and_unchanged(name: str) -> None:
    launcher, the_job = CASES[name]
    words = launcher.command(the_job).argv[-len(ARGV) :]
    assert tuple(map(relay.unguarded, words)) == ARGV
    assert words == ARGV or (the_job.tagged and not any(word.startswith(("-", ":", "@")) for word in words))


DEVICES_GO_TO = {
    "localhost": (job(LOCAL), True),
    "this machine by its name": (job((Host("Node1", 2),), here=frozenset({"node1"})), True),
    "others": (job(here=frozenset({"node1"})), False),
    "whatever is discovered": (job(LOCAL, elastic=Elastic(1, 2, "d")), False),
}


@pytest.mark.parametrize("name", DEVICES_GO_TO)
def test_horovodrun_gives_the_devices_of_this_shell_to_this_machine_alone(name: str) -> None:
    the_job, given = DEVICES_GO_TO[name]
    shell = {**BASE, "CUDA_VISIBLE_DEVICES": "4,5"}
    command = Horovodrun("horovodrun", OMPI4, tuple(shell.items()), "/usr/bin/ssh").command(the_job)
    assert ("CUDA_VISIBLE_DEVICES" in command.env, bool(command.files)) == (given, not given)


ODD = {"A;touch PWN1;": "1;touch PWN2", "X\nTOKEN$(touch PWN3)": "s3cret", "P.Q": 'a"b', "FOO.TOKEN": "hunter2"}


@pytest.mark.parametrize("inherit", [True, False])
@pytest.mark.parametrize("base", [{}, ODD, dict.fromkeys(ODD, "x")])
def test_a_printed_line_runs_nothing_that_a_variable_s_name_or_a_file_says(
    base: dict[str, str], inherit: bool, tmp_path: Path
) -> None:
    program = "import os; print(ascii(sorted(os.environ.items())))"
    files = {f"{tmp_path}/file": "a\nHVDTRAIN_END\ntouch PWN4\n"}
    command = Command((sys.executable, "-c", program), ODD, inherit=inherit, files=files, secrets=frozenset(list(ODD)[1::2]))
    env = {"PATH": os.environ["PATH"], **base}
    done = subprocess.run(
        ["bash", "-c", command.script(env)], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == files[f"{tmp_path}/file"]
    for name in list(ODD)[::2]:
        assert ascii((name, ODD[name])) in done.stdout
    assert "hunter2" not in command.script(env)


LOCAL_HOSTS = {
    (Host("LocalHost", 2),): (Host("localhost", 2),),
    (Host("127.0.0.5", 2, "al"),): (Host("localhost", 2),),
    (Host("ME.x.org", 2),): (Host("localhost", 2),),
    (Host("Me", 1), Host("node2", 1, "bo")): (Host("Me", 1), Host("node2", 1, "bo")),
    (Host("::1", 1), Host("node2", 1)): (Host("localhost", 1), Host("node2", 1)),
}


@pytest.mark.parametrize("hosts", LOCAL_HOSTS)
def test_this_machine_is_told_to_launchers_by_a_name_that_all_know(hosts: tuple[Host, ...]) -> None:
    assert local_hosts(hosts, frozenset({"me", "me.x.org"}), "al") == LOCAL_HOSTS[hosts]


def test_no_launcher_would_ask_for_another_user_on_this_machine() -> None:
    with pytest.raises(UsageError, match=r"run as al, not as bo \(bo@localhost\)"):
        local_hosts((Host("localhost", 1, "bo"),), frozenset(), "al")


def test_horovodrun_inside_a_job_hands_on_no_stale_rank() -> None:
    shell = {**BASE, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3", "OMPI_MCA_btl": "tcp"}
    command = Horovodrun("horovodrun", OMPI4, tuple(shell.items())).command(job(LOCAL))
    assert [name for name in command.environment(shell) if name.startswith(("OMPI_", "PMIX_"))] == ["OMPI_MCA_btl"]


def test_a_secret_is_in_no_argument_and_not_in_what_is_printed() -> None:
    secret = Job(("train",), UNEQUAL, 4, {"HF_TOKEN": "hunter2"})
    for launcher in (OpenMpi(OMPI4), OpenMpi(OMPI5), Hydra(MPICH), Hydra(INTEL), Srun("srun"), horovodrun()):
        command = launcher.command(secret)
        assert not any("hunter2" in word for word in command.argv)
        assert command.environment({})["HF_TOKEN"] == "hunter2"
        assert "hunter2" not in command.script({}) + command.script({"HF_TOKEN": "hunter2"})
        assert 'HF_TOKEN="$HF_TOKEN"' in command.script({})


REFUSED = {
    "ipv6": (horovodrun(), job((Host("fd00::1"), Host("b"))), "horovodrun takes no IPv6 address"),
    "user": (horovodrun(), job((Host("a", user="al"), Host("b"))), "takes no user of a single host .al@a."),
    "mpich": (horovodrun(Mpi("mpich", (5, 0, 2), "mpirun")), job(), "horovodrun does not recognise MPICH 5.0.2"),
    "intel": (horovodrun(INTEL), job(), "horovodrun takes no unequal slots with Intel MPI .node1:3,node2:1."),
    "no mpi": (horovodrun(None), job(), "horovodrun --mpi needs mpirun"),
    "too many": (
        horovodrun(),
        job(tuple(Host(f"node{n:05}", 8) for n in range(11_000))),
        "the command with 11000 hosts into one argument",
    ),
    "too many variables": (
        horovodrun(),
        Job(("x",), LOCAL, 2, {f"V{n}": "x" * 50_000 for n in range(3)}, "gloo"),
        "and all variables into one argument: 15[0-9],[0-9]+ bytes, and Linux takes 131,072",
    ),
    "too many arguments": (
        OpenMpi(OMPI5),
        Job(("x",) + ("y" * 9999,) * 20, LOCAL, 2),
        "200,010 bytes long in all, and Open MPI",
    ),
    "too much in all": (Hydra(MPICH), Job(("x",) + ("y" * 9999,) * 210, LOCAL, 2), "would be 2,101,[0-9]+ bytes long in all"),
    "too long a variable": (Hydra(MPICH), Job(("x",), LOCAL, 2, {"BIG": "x" * 131_068}), "BIG would be 131,073 bytes long"),
    "option as program": (
        Hydra(MPICH),
        Job(("-x", "A=1"), LOCAL, 2),
        "words of the program for its own: '-x', which is no program",
    ),
    "option of srun as program": (Srun("srun"), Job(("-x", "A=1"), LOCAL, 2), "srun takes words of the program"),
    "options behind the program": (
        OpenMpi(OMPI4),
        Job(("x", "--mca", "a", "b", ":", "--tune", "f", "--map-by"), LOCAL, 2),
        "Open MPI's mpirun takes words of the program for its own: '--mca', ':', '--tune'\n",
    ),
    "options behind the program, 5": (OpenMpi(OMPI5), Job(("x", "--map-by", "a"), LOCAL, 2), "for its own: '--map-by'"),
    "options behind the program, mpi": (horovodrun(), Job(("x", ":", "y"), LOCAL, 2), "horovodrun takes .*: ':'"),
    "gloo secret": (horovodrun(), Job(("x",), LOCAL, 2, {"MY_TOKEN": "s"}, "gloo"), "would show the secret MY_TOKEN"),
    "odd name": (horovodrun(), Job(("x",), LOCAL, 2, {"A.B": "s"}), "cannot pass the variable 'A.B'"),
    "elastic": (OpenMpi(OMPI4), job(elastic=Elastic(1, 2, "d")), "Open MPI's mpirun cannot change the number of ranks"),
    "port": (OpenMpi(OMPI4), job((Host("a", port=22), Host("b"))), "takes no port of a single host .a, port 22."),
    "mpich elastic": (Hydra(MPICH), job(elastic=Elastic(1, 2, "d")), "MPICH 5.0.2 cannot change the number of ranks"),
    "mpich port": (Hydra(MPICH), job((Host("a", port=22), Host("b"))), "MPICH 5.0.2 takes no port of a single host"),
    "mpich two nics": (Hydra(MPICH), job(nics=("eth0", "eth1")), "takes one network interface"),
    "mpich odd name": (Hydra(MPICH), Job(("x",), LOCAL, 2, {"A,B": "s"}), "cannot pass the variable 'A,B'"),
    "intel users": (Hydra(INTEL), job((Host("a", 2, "al"), Host("b", 2, "bo"))), "Intel MPI 2021.18 takes no user"),
    "srun user": (Srun("srun"), job((Host("a", user="al"),)), "srun takes no user of a single host"),
    "srun elastic": (Srun("srun"), job(elastic=Elastic(1, 2, "d")), "srun cannot change the number of ranks"),
    "srun odd name": (Srun("srun"), Job(("x",), LOCAL, 2, {"A.B": "s"}), "srun cannot pass the variable 'A.B'"),
    "jsrun user": (Jsrun("jsrun"), job((Host("a", user="al"),)), "jsrun takes no user of a single host"),
    "local elsewhere": (Local(START), job(), "starts ranks on this machine only, got node1, node2"),
    "local elastic": (Local(START), job(LOCAL, elastic=Elastic(1, 2, "d")), "the local launcher cannot change the number"),
    "bare in a folder with a blank": (
        horovodrun(),
        job(controller="gloo", cwd="/a b"),
        "gives the name of this folder to a shell on each host as it is: '/a b'",
    ),
    "odd interface": (horovodrun(), job(nics=("eth0;touch x",)), "'eth0;touch x' is no name of a network interface"),
    "colon in folder": (horovodrun(), Job(("x",), EQUAL, 4, launch_dir="/tmp/a:b"), "PATH can hold no folder with ':'"),
    "blank in folder": (
        Hydra(MPICH, "ssh"),
        Job(("x",), EQUAL, 4, launch_dir="/tmp/a b"),
        "no folder with blanks in its name ./tmp/a b/ssh.",
    ),
    "blank in ssh": (OpenMpi(OMPI4), job(ssh=Ssh(options=("-o", "ProxyCommand=a b"))), "splits ssh options at blanks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_launcher_cannot_do_is_refused_before_anything_starts(name: str) -> None:
    launcher, the_job, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as caught:
        launcher.command(the_job)
    assert caught.value.hint


def test_everything_that_a_launcher_cannot_do_comes_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        Srun("srun").command(Job(("x",), (Host("fd00::1"), Host("b", user="al", port=22)), 2, {"A.B": "s"}))
    assert caught.value.message.splitlines() == [
        "srun takes no IPv6 address (fd00::1)",
        "srun takes no user of a single host (al@b)",
        "srun takes no port of a single host (b, port 22)",
        "srun cannot pass the variable 'A.B'",
    ]
    assert caught.value.hint == "Slurm knows its nodes by name: use the node's name; leave it out"


VERSIONS = {
    "mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/community/help/": ("openmpi", (4, 1, 6)),
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/": ("openmpi", (5, 0, 11)),
    "mpirun (OpenRTE) 4.0.3": ("openmpi", (4, 0, 3)),
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: x": ("mpich", (5, 0, 2)),
    "Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213 (id: 4f55822)\n": ("intel", (2021, 12)),
}


@pytest.mark.parametrize("text", VERSIONS)
def test_the_mpi_is_told_from_its_version_text(text: str) -> None:
    mpi = parse_version(text, "mpirun")
    assert (mpi.kind, mpi.version) == VERSIONS[text]


@pytest.mark.parametrize("text", ["", "\n\n", "mpirun: something else 1.0", "bash: mpirun: command not found"])
def test_an_unknown_mpi_is_named_as_unknown(text: str) -> None:
    with pytest.raises(UsageError, match="belongs to no MPI that is known here"):
        parse_version(text, "/usr/bin/mpirun")


def test_more_ranks_than_slots_says_what_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        fit((Host("node01", 4), Host("node02", 2)), 8, source="hosts")
    assert caught.value.message == "8 processes requested, 'hosts' offers 6 slots (node01: 4, node02: 2)"
    assert caught.value.hint == "use -np 6, raise the slots, or add --oversubscribe"
    with pytest.raises(UsageError) as caught:
        fit((Host("localhost", 1),), 2, source="-H localhost")
    assert caught.value.message == "2 processes requested, '-H localhost' offers 1 slot (localhost: 1)"
    assert caught.value.hint == "use -np 1, write 'localhost slots=2', or add --oversubscribe"
    for count in (0, -1):
        with pytest.raises(UsageError, match="-np must be a positive integer"):
            fit((Host("a"),), count, source="hosts")


FITS = {
    (6, False): ((3, 1, 2), [3, 1, 2]),
    (5, False): ((3, 1, 2), [3, 1, 1]),
    (3, False): ((3, 1, 2), [3]),
    (8, True): ((3, 1, 2), [4, 2, 2]),
    (13, True): ((3, 1, 2), [6, 3, 4]),
}


@pytest.mark.parametrize("case", FITS)
def test_each_host_gets_exactly_the_slots_that_are_used(case: tuple[int, bool]) -> None:
    slots, expected = FITS[case]
    hosts = [Host(f"h{number}", count) for number, count in enumerate(slots)]
    used = fit(hosts, case[0], source="hosts", oversubscribe=case[1])
    assert [host.slots for host in used] == expected
    assert sum(expected) == case[0]


def test_places_of_uneven_slots() -> None:
    places = place([Host("a", 3), Host("b", 1), Host("c", 2)])
    rows = [(slot.rank, slot.host.name, slot.local_rank, slot.local_size, slot.node_rank, slot.cross_rank) for slot in places]
    assert rows == [
        (0, "a", 0, 3, 0, 0),
        (1, "a", 1, 3, 0, 0),
        (2, "a", 2, 3, 0, 0),
        (3, "b", 0, 1, 1, 1),
        (4, "c", 0, 2, 2, 2),
        (5, "c", 1, 2, 2, 1),
    ]


def _laid_out(hosts: int) -> float:
    """Lay out 8 ranks on each of so many hosts, and write the command: seconds of this process."""
    text = "".join(f"node{number:05} slots=8\n" for number in range(hosts))
    start = time.process_time()  # other tests may keep the cores busy meanwhile
    used = fit(hostfile.parse(text).hosts, hosts * 8, source="hosts")
    places = place(used)
    command = OpenMpi(OMPI4).command(Job(ARGV, used, hosts * 8, ENV, launch_dir="/tmp/own"))
    elapsed_s = time.process_time() - start
    assert (len(places), max(map(len, command.argv)) < 128 * 1024) == (hosts * 8, True)
    return elapsed_s


def test_ten_thousand_hosts_take_time_in_proportion() -> None:
    few_s = min(_laid_out(1_000) for _ in range(3))
    assert _laid_out(10_000) < 40 * few_s  # in proportion: 10; by pairs: 100 (benchmarks/launch.py has the seconds)


LONG = {
    "slots": (tuple(Host(f"n{n}", 1 + n % 2) for n in range(70_000)), "the value of --slots would be 139,999 bytes long"),
    "devices": (tuple(Host(f"n{n}", 1, devices=(n % 8,)) for n in range(70_000)), "the value of --devices would be 139,999"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_the_kernel_would_refuse_is_refused_with_a_reason(name: str) -> None:
    hosts, message = LONG[name]
    with pytest.raises(UsageError) as caught:
        OpenMpi(OMPI4).command(relay.wrap(job(hosts), start=START))
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 200
    assert "use fewer hosts" in caught.value.hint


def test_srun_keeps_an_order_of_hosts_that_is_not_slurms() -> None:
    def argv(*names: str) -> tuple[str, ...]:
        return Srun("srun").command(job(tuple(Host(name, 2) for name in names))).argv

    assert "--nodelist=node[2,10]" in argv("node2", "node10")
    assert "--distribution=arbitrary" in argv("node10", "node2")
