"""``hvdtrain run``: build a launcher's command and run it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain import startup
from hvdtrain.cli import misplaced, run_job, show
from hvdtrain.cli.ranges import Seconds
from hvdtrain.cli.sections import SectionCommand, section
from hvdtrain.cli.work import CONFIG, Work, recipe_work
from hvdtrain.errors import JobError, UsageError
from hvdtrain.launch import (
    GRACE_S,
    Elastic,
    Host,
    check_lengths,
    detect,
    discovery,
    fit,
    leftovers,
    local_hosts,
    nics,
    output,
    probe,
    process,
    this_host,
)
from hvdtrain.launch.verdict import Verdict

if TYPE_CHECKING:
    from hvdtrain.config import Config

#: How long a recipe may take to save and end by default: less than the 30 s that schedulers give.
STOP_S = 25.0
#: Time between the end of a job and its restart.
_RESTART_AFTER_S = 2.0


class RunCommand(SectionCommand):
    """Remembers whether ``--`` stood before the arguments: then they are a program to start, else a recipe and its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            misplaced.check_run(ctx, words, error.option_name)
            raise
        what: tuple[str, ...] = ctx.params.get("what", ())
        at = len(words) - len(what)
        ctx.params["is_program"] = at > 0 and words[at - 1] == "--"
        ctx.params["before"] = tuple(words[:at])
        return rest


where, launcher, ssh = section("Where"), section("Launcher"), section("ssh")
elastic_job, environ, shown, ends = section("Elastic"), section("Environment"), section("Output"), section("Ends")


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    short_help="Start a job on one or many hosts through a launcher.",
)
@where("-np", "--num-proc", "np", type=int, metavar="N", help="Number of ranks.  [default: all slots]")
@where("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-16]:4.  [default: the batch job's, else localhost]")
@where("--hostfile", metavar="FILE", help="Hosts and slots in a file; any dialect.")
@where("--strict", is_flag=True, help="A host without slots is an error instead of one slot.")
@where("--include", multiple=True, metavar="HOST[:SLOTS]", help="Use these hosts or slots only; may be repeated.")
@where("--exclude", multiple=True, metavar="HOST[:SLOTS]", help="Leave hosts or slots out: node3 or node3:0,2-3.")
@where("--oversubscribe", is_flag=True, help="Allow more ranks than slots.")
@where("--share-devices", is_flag=True, help="Allow several ranks on one GPU.")
@launcher(
    "--launcher",
    type=click.Choice(["auto", *detect.LAUNCHERS]),
    default="auto",
    metavar="NAME",
    help=f"What starts the ranks: {', '.join(detect.LAUNCHERS)}.  [default: auto]",
)
@launcher("--mpi/--gloo", "mpi", default=True, help="What Horovod coordinates over.  [default: --mpi]")
@launcher("--nic", multiple=True, metavar="NAME", help="Network interface to use on all hosts; may be repeated.")
@launcher("--launcher-arg", multiple=True, metavar="ARG", help="One more argument for the launcher, passed last.")
@launcher("--dry-run", is_flag=True, help="Print the command and stop.")
@ssh("--probe/--no-probe", default=True, help="Ask every host first whether it can take part.  [default: --probe]")
@ssh("--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="ssh port of all hosts.")
@ssh("--ssh-identity-file", default="", metavar="FILE", help="ssh key.")
@ssh("--ssh-arg", multiple=True, metavar="ARG", help="One more argument for ssh; may be repeated.")
@ssh("--no-host-key-check", is_flag=True, help="Let ssh connect to hosts whose keys it does not know.")
@elastic_job("--host-discovery-script", metavar="FILE", help="Prints a line host:slots for each usable host.")
@elastic_job("--min-np", type=click.IntRange(1), metavar="N", help="Keep going, or restart, while this many ranks are left.")
@elastic_job("--max-np", type=click.IntRange(1), metavar="N", help="Grow up to this many ranks.")
@environ("--env", multiple=True, metavar="NAME[=VALUE]", help="Pass a variable to the ranks; NAME may be a pattern.")
@environ("--env-file", multiple=True, metavar="FILE", help="Pass the variables of a file with NAME=VALUE lines.")
@environ("--no-tuned", is_flag=True, help="Leave out what hvdtrain tune has found for this recipe and these hosts.")
@shown(
    "--quiet-ranks", is_flag=True, help="Show the output of rank 0 only; files (of a recipe, or with --log-dir) get all of it."
)
@shown("--prefix/--no-prefix", default=True, help="Begin each line with [rank host].  [default: --prefix]")
@shown("--timestamps", is_flag=True, help="Begin each line with the time.")
@shown("--log-dir", metavar="DIR", help="Write DIR/rank-N/stdout and stderr.  [default: RUN-DIR/logs]")
@shown("--no-relay", is_flag=True, help="Start the ranks bare: no prefix, no files, no clean-up of their children.")
@ends(
    "--grace",
    type=Seconds(0.1, 3600),
    default=GRACE_S,
    show_default=True,
    metavar="S",
    help="Seconds for a rank to end by itself.",
)
@ends(
    "--stop-timeout",
    type=Seconds(0.1, 86400),
    default=STOP_S,
    show_default=True,
    metavar="S",
    help="Seconds for a recipe to save and end in order (SIGTERM, SIGUSR1).",
)
@ends("--max-restarts", type=click.IntRange(0), default=0, metavar="N", help="Start a job that failed again, N times at most.")
@click.argument("what", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE [TRAIN OPTIONS] | -- PROGRAM [ARGS]]")
def command(what: tuple[str, ...], dry_run: bool, is_program: bool, before: tuple[str, ...], **options: Any) -> int:
    """Start a job on one or many hosts.

    RECIPE is trained by `hvdtrain train` on every rank; the options after it are passed on to it unchanged (see `hvdtrain train
    --help`). Without RECIPE, the one that ./hvdtrain.yaml names is trained. After `--`, any program is started instead.
    """
    if not what and (is_program or not Path(CONFIG).exists()):
        raise UsageError(
            f"nothing to run: {'no program after --' if is_program else f'no recipe, no program, and no {CONFIG} in {Path.cwd()}'}",
            "hvdtrain run -np 2 RECIPE.py, or hvdtrain run -np 2 -- PROGRAM",
        )
    began_at = time.time()
    check_lengths((*what, *options["launcher_arg"]), "write it to a file that the program reads")
    base = dict(os.environ)
    hosts, elastic, np = run_job.hosts_of(base, options)
    with process.unwinding(), contextlib.ExitStack() as stack:

        def judged(words: Sequence[str]) -> Config:
            return run_job.config_of(words, hosts, elastic, base, options)

        work = Work(what) if is_program else recipe_work(before, what, judged, stack, dry_run=dry_run)
        if not dry_run:
            _tidy()
        options |= {"launch_dir": stack.enter_context(_folder()), "started": None if dry_run else began_at, "began": began_at}
        used, ranks, asks = hosts, np, False
        for number in itertools.count(1):
            try:
                failed, asks = _start(work, used, elastic, ranks, base, options, dry_run=dry_run)
            except probe.HostsError as error:
                if number == 1:
                    raise
                failed = Verdict(error.message, error.hint, error.exit_code)  # a host has gone since it was asked
            if failed is None:
                break
            if failed.stopped:
                click.echo(f"{failed.message}{f'{chr(10)}Hint: {failed.hint}' if failed.hint else ''}", err=True)
                return failed.exit_code
            if failed.is_final or number > options["max_restarts"]:
                raise JobError(failed.message, failed.hint, exit_code=failed.exit_code)
            click.echo(f"Error: {failed.message}", err=True)
            time.sleep(_RESTART_AFTER_S)  # what the failed job still holds (ports, memory, devices) is let go meanwhile
            used, ranks = _remaining(hosts, np, work, options, failed) if asks else (hosts, np)
            work, options["began"] = work.again(), time.time()
            where = f"{ranks} {'ranks' if ranks > 1 else 'rank'} on {_names(used)}"
            click.secho(f"restart {number} of {options['max_restarts']}: {where}", err=True, fg="yellow")
    return 0


def _tidy() -> None:
    count, size = leftovers.remove()
    if count:
        what = f"{count} file{'s' if count > 1 else ''} ({size >> 20} MB) that killed processes had left in {leftovers.FOLDER}"
        click.secho(f"removed: {what}", err=True, dim=True)


def _remaining(
    hosts: tuple[Host, ...], np: int, work: Work, options: Mapping[str, Any], failed: Verdict
) -> tuple[tuple[Host, ...], int]:
    """The hosts that can take part still, and as many ranks as fit there.

    Raises:
        JobError: too few; with the failure that led to this.
    """
    answers = run_job.ask(hosts, work, options)
    bad = {answer.host: answer.problem for answer in probe.problems(answers, str(Path.cwd()))}
    for name, problem in bad.items():
        click.secho(f"{name} is left out: {problem}", err=True, fg="yellow")
    kept = tuple(host for host in hosts if host.name not in bad)
    slots = sum(host.slots for host in kept)
    least = options["min_np"] or 1
    if slots < least:
        raise JobError(
            f"{failed.message}\n{slots} ranks are left on hosts that answer, and --min-np is {least}",
            failed.hint,
            exit_code=failed.exit_code,
        )
    ranks = min(np, slots)
    return fit(kept, ranks, source="the hosts that answer"), ranks


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8]) + (
        f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    )


def _start(
    work: Work,
    hosts: tuple[Host, ...],
    elastic: Elastic | None,
    np: int,
    base: dict[str, str],
    options: Mapping[str, Any],
    *,
    dry_run: bool,
) -> tuple[Verdict | None, bool]:
    """Run the job once. How it failed, if it did; and whether its hosts can be asked by ssh."""
    job = run_job.job_of(work, hosts, elastic, np, base, options)
    found = detect.look(base)
    choice = detect.choose(options["launcher"], found, job)
    click.secho(f"launcher: {choice.launcher.name} ({choice.reason})", err=True, dim=True)
    if choice.launcher.name not in detect.BATCH:
        job = replace(job, hosts=local_hosts(job.hosts, job.here, detect.own_user()))
    probed = options["probe"] and detect.uses_ssh(choice, found, job)
    if probed:
        job = run_job.probed(job, work, options, dry_run=dry_run)
    elif options["nic"]:
        complete = not job.is_remote
        run_job.warn(nics.check(options["nic"], {"this machine": this_host.interfaces()}, complete=complete).warnings)
    if work.is_recipe and not dry_run:
        job = replace(job, env={**job.env, startup.LAUNCH: startup.launch(options["began"], time.time())})
    over = run_job.tuned_of(work.config, job, hosts, found, base, options)
    given = run_job.defaults_of(job, work, found, choice, base, over)
    job = replace(job, env={**{each.name: each.value for each in given}, **job.env})
    started = choice.launcher.command(job)
    if dry_run:
        click.echo(replace(started, notes=tuple(run_job.notes(job, work.config, over, given, base))).script(base))
        return None, probed
    if job.elastic is not None:
        run_job.warn(discovery.warnings(job.elastic.discovery_script, job.np, Path(job.cwd)))
    style = output.Style(np, sys.stdout.isatty(), options["prefix"], options["timestamps"], options["quiet_ranks"])
    log_dir = options["log_dir"] or (work.run_dir / "logs" if work.run_dir is not None else None)
    return show.run(started, base, job, style, work.run_dir, Path(log_dir) if log_dir else None), probed


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for what the launcher reads."""
    try:
        made = tempfile.TemporaryDirectory(prefix="hvdtrain-")
    except OSError as error:
        raise UsageError(
            f"no folder for temporary files can be made: {error.strerror}", "set TMPDIR to a folder that can be written to"
        ) from None
    with made as folder:
        yield folder
