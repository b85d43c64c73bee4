"""Options on the wrong side of RECIPE in ``hvdtrain run``: told once and with the mended line, before anything starts.

What stands before the recipe is for ``run``, what stands after it for ``train``. The two have no option in common but --help.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import click

from hvdtrain.cli import train_words
from hvdtrain.errors import UsageError


def check_train(run: click.Context, before: Sequence[str], recipe: str | None, words: Sequence[str]) -> None:
    """Read the words after the recipe as ``hvdtrain train`` will, without running it.

    Raises:
        UsageError: an option of ``run`` is among them, or ``train`` would refuse them: on every rank, after the start.
    """
    train = train_words.command(run)
    try:
        train.make_context("hvdtrain train", [*([recipe] if recipe else []), *words])
    except click.NoSuchOption as error:
        moved, rest = _split(words, _options(run.command, run))
        if moved:
            line = shlex.join(["hvdtrain", "run", *before, *moved, *([recipe] if recipe else []), *rest])
            raise UsageError(f"'{_name(moved[0])}' is an option of run, and belongs before the recipe", line) from None
        near = f"did you mean {', '.join(error.possibilities)}? " if error.possibilities else ""
        hint = f"{near}hvdtrain train --help lists them"
        raise UsageError(f"hvdtrain train has no option '{error.option_name}'", hint) from None
    except click.UsageError as error:
        hint = "hvdtrain train --help lists the options and what they take"
        raise UsageError(error.format_message().removesuffix("."), hint) from None


def check_run(run: click.Context, words: Sequence[str], unknown: str) -> None:
    """UsageError if ``unknown``, which ``run`` does not know, is an option of ``train``."""
    known = _options(train_words.command(run), run)
    if unknown not in known:
        return
    moved, rest = _split(words, known)
    try:
        what = run.command.make_parser(run).parse_args(list(rest))[0].get("what")
        named = "--" not in rest and isinstance(what, tuple) and what != ()  # Click 8.5 has a value of its own for none
    except click.UsageError:
        named = False
    line = shlex.join(["hvdtrain", "run", *(rest if "--" not in rest else []), *([] if named else ["RECIPE.py"]), *moved])
    raise UsageError(f"'{unknown}' is an option of train, and belongs after the recipe", line)


def _options(command: click.Command, context: click.Context) -> Mapping[str, bool]:
    """Each spelling of each option, and whether a value follows it. Without --help, which both commands have."""
    return {
        name: not (option.is_flag or option.count)
        for option in command.get_params(context)
        if isinstance(option, click.Option) and option.name != "help"
        for name in (*option.opts, *option.secondary_opts)
    }


def _split(words: Sequence[str], known: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The options that are known, with their values, and all other words. What comes after ``--`` is not looked at."""
    moved: list[str] = []
    rest: list[str] = []
    left = list(words)
    while left and left[0] != "--":
        word = left.pop(0)
        takes_value = known.get(_name(word))
        (rest if takes_value is None else moved).append(word)
        if takes_value and "=" not in word and left:
            moved.append(left.pop(0))
    return moved, [*rest, *left]


def _name(word: str) -> str:
    return word.partition("=")[0]
