"""The hostfile parser: every dialect, one rule about slots, all mistakes at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import MAX_RANKS, Host, fit, hostfile
from hvdtrain.launch.hostfile import HostfileError, parse, parse_option

A2, B4 = Host("a", 2), Host("b", 4)

ACCEPTED = {
    "open mpi, horovod, deepspeed": ("a slots=2\nb slots=4\n", (A2, B4)),
    "mpich and intel": ("a:2\nb:4\n", (A2, B4)),
    "both in one file": ("a slots=2\nb:4\n", (A2, B4)),
    "command line list in a file": ("a:2,b:4\n", (A2, B4)),
    "lsf pairs": ("a 2 b 4\n", (A2, B4)),
    "pbs: a line for each slot": ("a\na\nb\nb\nb\nb\n", (A2, B4)),
    "other spellings": ("a count=2\nb cpu=4\n", (A2, B4)),
    "blanks around =": ("a slots = 2\nb slots =4\n", (A2, B4)),
    "blank lines, blanks at the end, tabs": ("\n\na \t slots=2   \n\t\nb\tslots=4\t\n\n", (A2, B4)),
    "carriage returns": ("a slots=2\r\nb slots=4\r\n", (A2, B4)),
    "no newline at the end": ("a slots=2\nb slots=4", (A2, B4)),
    "comments": ("# all\n// of\n  # them\na slots=2 # two\nb slots=4 // four\n#b slots=0\n", (A2, B4)),
    "maximum": ("a slots=2 max_slots=8\nb slots=1 max-slots=2", (Host("a", 2, max_slots=8), Host("b", 1, max_slots=2))),
    "users and ports": ("al@a slots=2 port=2222\nb:4 username=bo", (Host("a", 2, "al", 2222), Host("b", 4, "bo"))),
    "ipv6 in brackets": ("[fd00::1] slots=2\n[FD00:0::2]:4", (Host("fd00::1", 2), Host("fd00::2", 4))),
    "ipv4": ("10.0.0.1:2\n10.0.0.2 slots=4", (Host("10.0.0.1", 2), Host("10.0.0.2", 4))),
    "ranges": ("n[08-10]:2\ng[1,3] slots=4", (*(Host(f"n{k}", 2) for k in ("08", "09", "10")), Host("g1", 4), Host("g3", 4))),
    "same short name, other domain": ("a.x.svc:2\na.y.svc:4", (Host("a.x.svc", 2), Host("a.y.svc", 4))),
    "underscores": ("my_app_1:2", (Host("my_app_1", 2),)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_accepted_form_gives_its_hosts(name: str) -> None:
    text, hosts = ACCEPTED[name]
    parsed = parse(text)
    assert parsed.hosts == hosts
    assert parsed.warnings == ()


MISTAKES = {
    "a slots=four": "hosts:1: 'slots' must be a positive integer, got 'slots=four'",
    "a slots=0": "hosts:1: 'slots' must be a positive integer, got 'slots=0'",
    "a slots=-1": "hosts:1: 'slots' must be a positive integer, got 'slots=-1'",
    "a slots=": "hosts:1: 'slots' must be a positive integer, got 'slots='",
    "a slots=٣": "hosts:1: 'slots' must be a positive integer, got 'slots=٣'",
    "a:four": "hosts:1: 'slots' must be a positive integer, got 'a:four'",
    "a:0": "hosts:1: 'slots' must be a positive integer, got 'a:0'",
    "a:": "hosts:1: 'slots' must be a positive integer, got 'a:'",
    "a slots=2 slots=3": "hosts:1: 'slots' is given twice, 'slots=2' and 'slots=3'",
    "a:2 slots=3": "hosts:1: 'slots' is given twice, 'a:2' and 'slots=3'",
    "al@a:2 user=bo": "hosts:1: 'user' is given twice, 'al@a:2' and 'user=bo'",
    "a slots=4 max_slots=2": "hosts:1: max_slots=2 is less than slots=4",
    "a slots=2\nb slots=2\na slots=2": "hosts:3: host 'a' is named again, first on hosts:1, and its slots are stated",
    "a\nb:1\na slots=2": "hosts:3: host 'a' is named again, first on hosts:1, and its slots are stated",
    "A:2\na:2": "hosts:2: host 'a' is named again, first on hosts:1, and its slots are stated",
    "root@a:2\nalice@a:2": "hosts:2: host 'a' is named again, first on hosts:1, and its slots are stated",
    "root@a\nalice@a": "hosts:2: host 'a' has another user or port on hosts:1",
    "a b": "hosts:1: unexpected word 'b' after the host name",
    "a cores=4": "hosts:1: unknown setting 'cores' in 'cores=4'",
    "4": "hosts:1: '4' ends in a number, so it is no host name, and it is no IPv4 address of a host",
    "fd00::1": "hosts:1: 'fd00::1' looks like an IPv6 address without brackets",
    "[fd00::1": "hosts:1: '[' without ']' in '[fd00::1'",
    "[fd00::1]2": "hosts:1: unexpected '2' after the address in '[fd00::1]2'",
    "[fe80::1%eth0]:2": "hosts:1: '[fe80::1%eth0]' is no IPv6 address of a host",
    "[::ffff:10.0.0.1]:2": "hosts:1: '[::ffff:10.0.0.1]' is an IPv4 address",
    "[::]:2": "hosts:1: '[::]' is no IPv6 address of a host",
    "-oProxyCommand=sh": "hosts:1: host name '-oProxyCommand=sh' begins with '-'",
    "a;reboot": "hosts:1: host name 'a;reboot' contains ';'",
    "$(id):2": "hosts:1: host name '$(id)' contains '$'",
    "a`id`": "hosts:1: host name 'a`id`' contains '`'",
    "-l@a": "hosts:1: '-l' is not a user name",
    "@a": "hosts:1: '' is not a user name",
    "a user=": "hosts:1: '' is not a user name",
    "nodé:2": "hosts:1: host name 'nodé' contains 'é'",
    "a,,b": "hosts:1: empty host name between commas",
    ":2": "hosts:1: the host name is empty",
    "n[1-x]": "hosts:1: '1-x' in 'n[1-x]' is not a number or a range such as 01-16",
    "n[3-1]": "hosts:1: range '3-1' in 'n[3-1]' runs backwards",
    "n[1-999999999]": "hosts:1: 'n[1-999999999]' stands for more than 100000 names",
    "n1]": "hosts:1: ']' without '[' in 'n1]'",
    "a slots=1000000000000": "hosts:1: 'slots' is at most 250000, got 'slots=1000000000000'",
    "a port=70000": "hosts:1: 'port' is at most 65535, got 'port=70000'",
    "": "hosts: no host in it",
    "# only a comment": "hosts: no host in it",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_each_mistake_is_named_with_its_line_and_a_hint(text: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse(text)
    assert caught.value.message.splitlines()[0] == MISTAKES[text]
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_all_mistakes_of_a_file_come_together() -> None:
    with pytest.raises(HostfileError) as caught:
        parse("node01 slots=4\nnode02 slots=four\n\nnode03 cores=2\nnode01:4\n")
    assert [mistake.line for mistake in caught.value.mistakes] == [2, 4, 5]
    assert str(caught.value) == (
        "hosts:2: 'slots' must be a positive integer, got 'slots=four'\n"
        "    node02 slots=four\n"
        "hosts:4: unknown setting 'cores' in 'cores=2'\n"
        "    node03 cores=2\n"
        "hosts:5: host 'node01' is named again, first on hosts:1, and its slots are stated\n"
        "    node01:4\n"
        "Hint: write 'node02 slots=4'; use slots=, max_slots=, user= and port=; "
        "name 'node01' once, with all its slots: 'node01 slots=8'"
    )


def test_a_thousand_mistakes_do_not_fill_the_screen() -> None:
    with pytest.raises(HostfileError) as caught:
        parse("a slots=x\n" * 1000)
    assert len(caught.value.mistakes) == 1000
    assert str(caught.value).count("\n") < 50


def test_a_control_character_in_a_file_does_not_reach_the_terminal() -> None:
    with pytest.raises(HostfileError) as caught:
        parse("a\x1b[31m:2")
    assert "\x1b" not in str(caught.value)


def test_a_bare_name_is_one_slot_with_a_warning_and_a_mistake_under_strict() -> None:
    parsed = parse("a:2\nworker-0\nworker-1\n")
    assert parsed.hosts == (A2, Host("worker-0"), Host("worker-1"))
    assert parsed.warnings == (
        "hosts:2: 'worker-0' (and 1 more hosts) has no slots, taken as 1; write 'worker-0 slots=4' or 'worker-0:4'",
    )
    with pytest.raises(HostfileError) as caught:
        parse("a:2\nworker-0\nworker-1\n", strict=True)
    assert [(mistake.line, mistake.hint) for mistake in caught.value.mistakes] == [
        (2, "write 'worker-0 slots=4' or 'worker-0:4'"),
        (3, "write 'worker-1 slots=4' or 'worker-1:4'"),
    ]


def test_the_command_line_list() -> None:
    assert parse_option("a:2,n[1-2]:4,[::2]:1").hosts == (A2, Host("n1", 4), Host("n2", 4), Host("::2", 1))
    assert parse_option("localhost").warnings == (
        "-H, item 1: 'localhost' has no slots, taken as 1; write 'localhost slots=4' or 'localhost:4'",
    )
    with pytest.raises(UsageError, match="empty host name between commas"):
        parse_option("a:2,,b:2")


def test_a_missing_file_is_an_error_and_never_a_local_run(tmp_path: Path) -> None:
    for path in (tmp_path / "nope", tmp_path):
        with pytest.raises(UsageError) as caught:
            hostfile.read(path)
        assert str(path) in caught.value.message
        assert caught.value.exit_code == 2
    (tmp_path / "binary").write_bytes(b"a:2\n\xff\xfe")
    with pytest.raises(HostfileError, match="binary:2: byte 0xff"):
        hostfile.read(tmp_path / "binary")
    with pytest.raises(UsageError, match="hostfile '/dev/zero' cannot be read: it is larger than 16 MiB"):
        hostfile.read("/dev/zero")


def test_the_mark_that_windows_editors_put_first_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa:2\r\nb slots=4\r\n")
    assert hostfile.read(tmp_path / "hosts").hosts == (A2, B4)


EXAMPLES = {"two-hosts": 8, "unequal": 11, "ranges": 140, "localhost": 2}


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_examples_are_what_they_say(path: Path) -> None:
    parsed = hostfile.read(path, strict=True)
    assert (sum(host.slots for host in parsed.hosts), parsed.warnings) == (EXAMPLES[path.name], ())


ONE_MACHINE = ["[::1]:2,localhost:2", "127.0.0.1:1,LOCALHOST:1", "localhost:1,127.0.0.2", "localhost,localhost:1"]


@pytest.mark.parametrize("text", ONE_MACHINE)
def test_other_names_of_this_machine_count_as_naming_it_again(text: str) -> None:
    with pytest.raises(HostfileError, match="is named again, first on hosts:1"):
        parse(text.replace(",", "\n"))


def test_a_host_named_again_by_another_name_says_by_which() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_option("[::1]:2,localhost:2")
    assert "host 'localhost' is named again, first on -H, item 1 as '::1', and its slots are stated" in caught.value.message
    assert parse("127.0.0.1\nlocalhost\n").hosts == (Host("127.0.0.1", 2),)


LARGE = {
    "hosts on one line": ",".join(f"{letter}[0-99999]" for letter in "abcdefgh"),
    "names on one line": "a," * 200_000 + "a",
    "hosts": "\n".join(f"{letter}[0-49999]" for letter in "abc"),
    "slots": "a[0-999]:1000",
    "mistakes": "-\n" * 100_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_for_a_hostfile_is_refused_soon(name: str) -> None:
    start = time.process_time()
    with pytest.raises(HostfileError) as caught:
        parse(LARGE[name])
    assert any(mistake.problem.startswith("more than ") for mistake in caught.value.mistakes)
    assert len(str(caught.value)) < 10_000
    assert time.process_time() - start < 8


def test_long_runs_of_blanks_take_no_time() -> None:
    start = time.process_time()
    assert parse(f"a{' ' * 1_000_000}slots{chr(9) * 1_000_000}={' ' * 1_000_000}2{' ' * 1_000_000}").hosts == (Host("a", 2),)
    with pytest.raises(HostfileError):
        parse(f"a{' ' * 1_000_000}x")
    assert time.process_time() - start < 2


def test_a_comment_is_a_thing_of_files() -> None:
    with pytest.raises(HostfileError, match="contains '#'"):
        parse_option("a:2,b#c")


def test_more_ranks_than_any_job_has_are_refused_before_a_place_is_made_for_each() -> None:
    with pytest.raises(UsageError, match="1000000000 ranks are more than a job can have"):
        fit((Host("a", 2), Host("b", 2)), 10**9, source="hosts", oversubscribe=True)
    assert sum(host.slots for host in fit((Host("a", 2),), MAX_RANKS, source="hosts", oversubscribe=True)) == MAX_RANKS
