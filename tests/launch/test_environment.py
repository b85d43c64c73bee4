"""What reaches the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import environment
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
    "HOROVOD_CYCLE_TIME": "1",
    "LC_ALL": "C",
}


def test_the_list_is_explicit() -> None:
    chosen = select(SHELL)
    assert sorted(chosen.values) == ["CUDA_HOME", "HF_HOME", "HOROVOD_CYCLE_TIME", "LC_ALL", "NCCL_DEBUG", "PATH", "PYTHONPATH"]
    assert chosen.left_out == {"HF_TOKEN": "looks like a secret; name it with --env to pass it"}


def test_a_name_that_is_asked_for_passes_whatever_it_is() -> None:
    chosen = select(SHELL, ["HF_TOKEN", "MY_*", "BASH_FUNC_mod%%", "CUDA_VISIBLE_DEVICES", "NEW=a=b 'c'\n$d"])
    assert chosen.values["HF_TOKEN"] == "s3cret"
    assert chosen.values["MY_OWN"] == "1"
    assert chosen.values["BASH_FUNC_mod%%"] == "() { echo 'a b'; }"
    assert chosen.values["NEW"] == "a=b 'c'\n$d"
    assert chosen.asked == {"HF_TOKEN", "MY_OWN", "BASH_FUNC_mod%%", "CUDA_VISIBLE_DEVICES", "NEW"}
    assert chosen.left_out == {}


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
    "A=1\nB two\n": "env:2: 'B' is not NAME=VALUE",
    "A=1\nB.C=2\n": "env:2: 'B.C' is not NAME=VALUE",
    "A='1\n": "a quote is not closed",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_env_file_says_where(text: str, tmp_path: Path) -> None:
    (tmp_path / "env").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_file(tmp_path / "env")
    assert BAD_FILES[text] in caught.value.message


def test_a_missing_env_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        environment.read_file(tmp_path / "nope")
