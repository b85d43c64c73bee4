"""The command line: a lazy group, one file per command.

A command's module is imported when the command is used, so ``hvdtrain --help`` stays fast and needs no framework.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from hvdtrain.cli import inherited
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.world import World

#: command -> (module in hvdtrain.cli whose attribute ``command`` is the Click command, one line of help)
COMMANDS = {
    "run": ("run", "Start a job on one or many hosts through a launcher."),
    "train": ("train", "Train a recipe: one rank of a job, or a single process."),
    "checkpoint": ("checkpoint", "Show, check and export what training runs have saved."),
    "bench": ("bench", "Measure these hosts and a recipe: sums, links, steps, loading."),
    "tune": ("tune", "Find the settings under which a recipe's step is fastest here."),
    "hosts": ("hosts", "Show, check and convert lists of hosts."),
    "horovod": ("horovod", "Install, check or remove Horovod for the installed frameworks."),
}


class LazyGroup(click.Group):
    """A group that knows the names and the short help of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hvdtrain.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvdtrain")
def group() -> None:
    """Train one recipe in PyTorch, TensorFlow/Keras or NumPy, on one process or on many hosts."""


def main(argv: Sequence[str] | None = None, obj: object = None) -> int:
    """Run the command line and return the exit code; errors of the user's are printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments and World.from_env().size > 1:
            arguments = ["train"]  # started bare by a launcher: train what hvdtrain.yaml names
        inherited.prepare(is_rank=arguments[:1] == ["train"])
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UsageError("the current directory does not exist any more", "cd to one that does") from None
        result = group.main(args=arguments, prog_name="hvdtrain", standalone_mode=False, obj=obj)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except HvdtrainError as error:
        print_error(error)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return 130
    except inherited.OutputError as error:
        if error.is_unread:
            return 128 + signal.SIGPIPE  # as a shell counts it: the reader went away, and needs no message
        print_error(HvdtrainError(f"standard output cannot be written to: {error}", "is there room?"))
        return 1


def print_error(error: HvdtrainError) -> None:
    """Print the message and, on a line of its own, the hint."""
    if error.exit_code > 128 and not inherited.takes_text(2, within_s=1.0):
        return  # a signal may have ended us just because nobody reads
    click.secho(f"Error: {error.message}", err=True, fg="red")
    if error.hint:
        click.echo(f"Hint: {error.hint}", err=True)
