"""What reaches the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import Command, environment
from hvdtrain.launch.environment import is_secret, read_file, select

SHELL = {
    "PATH": "/bin",
    "PYTHONPATH": "/src dir",
    "NCCL_DEBUG": "INFO",
    "HF_HOME": "/hf",
    "HF_TOKEN": "s3cret",
    "MY_OWN": "1",
    "EDITOR": "vi",
    "FOO.BAR": "1",
    "BASH_FUNC_mod%%": "() { echo 'a b'; }",
    "CUDA_VISIBLE_DEVICES": "4,5",
    "CUDA_HOME": "/cuda",
    "HOROVOD_RANK": "3",
    "HOROVOD_HOSTNAME": "node7",
    "HOROVOD_CYCLE_TIME": "1",
    "LC_ALL": "C",
}


def test_the_list_is_explicit() -> None:
    chosen = select(SHELL)
    assert sorted(chosen.values) == ["CUDA_HOME", "HF_HOME", "HOROVOD_CYCLE_TIME", "LC_ALL", "NCCL_DEBUG", "PATH", "PYTHONPATH"]
    assert chosen.left_out == {"HF_TOKEN": "looks like a secret: --env NAME passes it"}


def test_a_name_that_is_asked_for_passes_whatever_it_is() -> None:
    chosen = select(SHELL, ["HF_TOKEN", "MY_*", "BASH_FUNC_mod%%", "CUDA_VISIBLE_DEVICES", "NEW=a=b 'c'\n$d"])
    assert chosen.values["HF_TOKEN"] == "s3cret"
    assert chosen.values["MY_OWN"] == "1"
    assert chosen.values["BASH_FUNC_mod%%"] == "() { echo 'a b'; }"
    assert chosen.values["NEW"] == "a=b 'c'\n$d"
    assert chosen.left_out == {}


def test_a_secret_that_a_pattern_names_is_left_out_with_a_word() -> None:
    shell = {**SHELL, "WANDB_API_KEY": "s3cret", "WANDB_PROJECT": "p"}
    why = "looks like a secret: --env NAME passes it, not a pattern"
    chosen = select(shell, ["WANDB_*", "HF_*"])
    assert "WANDB_API_KEY" not in chosen.values
    assert chosen.values["WANDB_PROJECT"] == "p"
    assert chosen.left_out == {"HF_TOKEN": why, "WANDB_API_KEY": why}
    assert select(shell, ["WANDB_*", "WANDB_API_KEY", "HF_TOKEN"]).left_out == {}


REFUSED = {
    "NOT_SET": "--env NOT_SET: this variable is not set here",
    "API_TOKEN=abc": "--env API_TOKEN=... puts a secret on the command line",
    "=x": "--env '=x' has no name",
}


@pytest.mark.parametrize("item", REFUSED)
def test_a_bad_item_is_refused(item: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(SHELL, [item])
    assert caught.value.message.startswith(REFUSED[item])
    assert "abc" not in str(caught.value)


def test_secrets_are_told_by_their_name() -> None:
    yes = [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "DB_PASSWORD",
        "passwd",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "APIKEY",
    ]
    no = ["PATH", "MONKEY", "KEYBOARD", "NCCL_DEBUG", "HVDTRAIN_KEYS", "PYTHONPATH"]
    assert [name for name in [*yes, *no] if is_secret(name)] == yes


def test_an_env_file_is_read_as_a_shell_would(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# a comment\nA=1\nexport B=\"two words\"\nC='line one\nline two'  # more\nEMPTY=\nD=$HOME\n")
    assert read_file(path) == {"A": "1", "B": "two words", "C": "line one\nline two", "EMPTY": "", "D": "$HOME"}
    chosen = select(SHELL, ["A=2"], read_file(path))
    assert (chosen.values["A"], chosen.values["B"]) == ("2", "two words")


BAD_FILES = {
    "A=1\nB two\n": "env:2: a word is not NAME=VALUE",
    "A=1\nB.C=2\n": "env:2: 'B.C=...' is not NAME=VALUE",
    "A='1\n": "a quote is not closed",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_env_file_says_where(text: str, tmp_path: Path) -> None:
    (tmp_path / "env").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_file(tmp_path / "env")
    assert BAD_FILES[text] in caught.value.message


def test_a_missing_env_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--env-file '/dev/zero' cannot be read: it is larger than 16 MiB"):
        read_file("/dev/zero")
    with pytest.raises(UsageError, match="cannot be read"):
        environment.read_file(tmp_path / "nope")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("TOKEN=ab#cd\n", {"TOKEN": "ab#cd"}),
        ("URL=http://x/#frag # a comment, don't stop\n# another\nB=1\n", {"URL": "http://x/#frag", "B": "1"}),
        ('\ufeffA="x # y"\n', {"A": "x # y"}),
        ("A='two\n# lines' B=2", {"A": "two\n# lines", "B": "2"}),
    ],
)
def test_a_hash_begins_a_comment_only_at_the_start_of_a_word(tmp_path: Path, text: str, values: dict[str, str]) -> None:
    (tmp_path / "env").write_text(text, encoding="utf-8")
    assert environment.read_file(tmp_path / "env") == values


def test_a_mistake_in_an_env_file_does_not_print_what_may_be_a_secret(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("DB_PASSWORD=correct horse-battery\n")
    with pytest.raises(UsageError) as caught:
        environment.read_file(tmp_path / "env")
    assert "horse" not in str(caught.value)
    assert f"{tmp_path}/env:1: " in caught.value.message


@pytest.mark.parametrize("name", ["DB_PASS", "SSHPASS", "SLURM_JWT", "MYSQL_PWD", "GITHUB_PAT", "WANDB_API_KEY", "HTTP_COOKIE"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert environment.is_secret(name)


@pytest.mark.parametrize("name", ["NUMEXPR_TOKENS", "TOKENIZERS_PARALLELISM", "PATH", "PASSES", "OMP_NUM_THREADS"])
def test_names_that_only_look_so_are_not(name: str) -> None:
    assert not environment.is_secret(name)


def test_a_pattern_passes_neither_secrets_nor_another_rank_s_identity() -> None:
    environ = {"WANDB_API_KEY": "s", "WANDB_MODE": "offline", "HOROVOD_RANK": "3", "BASH_FUNC_x%%": "() { :; }"}
    assert dict(environment.select(environ, ["*"]).values) == {"WANDB_MODE": "offline"}
    assert dict(environment.select(environ, ["WANDB_API_KEY"]).values) == {"WANDB_API_KEY": "s"}


def test_a_shell_inside_a_job_does_not_give_its_rank_to_the_ranks_started_from_it() -> None:
    base = {
        "OMPI_COMM_WORLD_RANK": "3",
        "HOROVOD_RANK": "5",
        "PMI_RANK": "1",
        "PMIX_NAMESPACE": "x",
        "OMPI_MCA_btl": "tcp",
        "PMIX_MCA_gds": "hash",
    }
    command = Command(("mpirun", "x"), {"B": "2"})
    assert command.environment(base) == {"OMPI_MCA_btl": "tcp", "PMIX_MCA_gds": "hash", "B": "2"}
    assert command.shell(base) == "env -u HOROVOD_RANK -u OMPI_COMM_WORLD_RANK -u PMIX_NAMESPACE -u PMI_RANK B=2 mpirun x"


def test_what_horovod_coordinates_over_is_said_by_the_option_alone() -> None:
    shell = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "ccl", "HOROVOD_CYCLE_TIME": "2"}
    assert dict(select(shell).values) == {"HOROVOD_CYCLE_TIME": "2"}
    assert environment.check_controller(shell, {}, "mpi") == [
        "HOROVOD_CONTROLLER=gloo of this shell is not passed on, --mpi decides (add --gloo)",
        "HOROVOD_CPU_OPERATIONS=ccl of this shell is not passed on, --mpi decides (--env HOROVOD_CPU_OPERATIONS passes it)",
    ]
    assert environment.check_controller(shell, {"HOROVOD_CPU_OPERATIONS": "ccl"}, "gloo") == []
    assert environment.check_controller({**shell, "HOROVOD_RANK": "0"}, {}, "mpi") == []
    with pytest.raises(UsageError, match="HOROVOD_CONTROLLER=gloo for the ranks contradicts --mpi"):
        environment.check_controller(shell, {"HOROVOD_CONTROLLER": "gloo"}, "mpi")
