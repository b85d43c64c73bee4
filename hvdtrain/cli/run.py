"""``hvdtrain run``: build a launcher's command and run it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hvdtrain.errors import JobError, UsageError
from hvdtrain.launch import (
    GRACE_S,
    Command,
    Controller,
    Job,
    Ssh,
    environment,
    failures,
    fit,
    frames,
    hostfile,
    output,
    process,
    relay,
    start_argv,
)
from hvdtrain.launch.detect import LAUNCHERS, choose
from hvdtrain.launch.watch import Watch
from hvdtrain.rundir import RunDir


class RunCommand(click.Command):
    """Remembers whether ``--`` stood before the arguments: then they are a program to start, else a recipe and its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        what: tuple[str, ...] = ctx.params.get("what", ())
        at = len(words) - len(what)
        ctx.params["is_program"] = bool(what) and at > 0 and words[at - 1] == "--"
        return rest


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    options_metavar="[OPTIONS]",
    short_help="Start a job on one or many hosts through a launcher.",
)
@click.option("-np", "--num-proc", "np", type=int, metavar="N", help="Number of ranks.  [default: all slots]")
@click.option("-H", "--hosts", metavar="LIST", help="Hosts and slots: node1:2,node2:2 or node[01-16]:4.  [default: localhost]")
@click.option("--hostfile", "hostfile_path", metavar="FILE", help="Hosts and slots in a file; any dialect.")
@click.option("--strict", is_flag=True, help="A host without slots is an error instead of one slot.")
@click.option("--oversubscribe", is_flag=True, help="Allow more ranks than slots.")
@click.option(
    "--launcher", type=click.Choice(["auto", *LAUNCHERS]), default="auto", show_default=True, help="What starts the ranks."
)
@click.option("--mpi/--gloo", "mpi", default=True, help="What Horovod coordinates over.  [default: --mpi]")
@click.option(
    "--env", "env", multiple=True, metavar="NAME[=VALUE]", help="Pass a variable to the ranks; NAME may be a pattern."
)
@click.option(
    "--env-file", "env_files", multiple=True, metavar="FILE", help="Pass the variables of a file with NAME=VALUE lines."
)
@click.option("--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="ssh port of all hosts.")
@click.option("--ssh-identity-file", default="", metavar="FILE", help="ssh key.")
@click.option("--ssh-arg", "ssh_args", multiple=True, metavar="ARG", help="One more argument for ssh; may be repeated.")
@click.option("--nic", "nics", multiple=True, metavar="NAME", help="Network interface to use on all hosts; may be repeated.")
@click.option(
    "--launcher-arg", "launcher_args", multiple=True, metavar="ARG", help="One more argument for the launcher, passed last."
)
@click.option("--quiet-ranks", is_flag=True, help="Show the output of rank 0 only; files get all of it.")
@click.option("--prefix/--no-prefix", default=True, help="Begin each line with [rank host].  [default: --prefix]")
@click.option("--timestamps", is_flag=True, help="Begin each line with the time.")
@click.option("--log-dir", metavar="DIR", help="Write DIR/rank-N/stdout and stderr.  [default: RUN-DIR/logs]")
@click.option(
    "--grace", type=float, default=GRACE_S, show_default=True, metavar="S", help="Seconds for a rank to end by itself."
)
@click.option("--share-devices", is_flag=True, help="Allow several ranks on one GPU.")
@click.option("--no-relay", is_flag=True, help="Start the ranks bare: no prefix, no files, no clean-up of their children.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@click.argument("what", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE [TRAIN OPTIONS] | -- PROGRAM [ARGS]")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    np: int | None,
    hosts: str | None,
    hostfile_path: str | None,
    strict: bool,
    oversubscribe: bool,
    launcher: str,
    mpi: bool,
    env: tuple[str, ...],
    env_files: tuple[str, ...],
    ssh_port: int | None,
    ssh_identity_file: str,
    ssh_args: tuple[str, ...],
    nics: tuple[str, ...],
    launcher_args: tuple[str, ...],
    quiet_ranks: bool,
    prefix: bool,
    timestamps: bool,
    log_dir: str | None,
    grace: float,
    share_devices: bool,
    no_relay: bool,
    dry_run: bool,
    what: tuple[str, ...],
    is_program: bool = False,
) -> int:
    """Start a job on one or many hosts.

    RECIPE is trained by `hvdtrain train` on every rank; the options after it are passed on to it unchanged. After `--`, any
    program is started instead.
    """
    if not what:
        raise UsageError(
            "nothing to run: no recipe and no program", "hvdtrain run -np 2 RECIPE.py, or hvdtrain run -np 2 -- PROGRAM"
        )
    listed = _hosts(hosts, hostfile_path, np, strict)
    for warning in listed.warnings:
        click.secho(f"Warning: {warning}", err=True, fg="yellow")
    count = listed.slots if np is None else np
    used = fit(listed.hosts, count, source=listed.source, oversubscribe=oversubscribe)
    run_dir, argv = (None, what) if is_program else _recipe(what)
    base = dict(os.environ)
    selection = environment.select(base, env, _given(env_files))
    controller: Controller = "mpi" if mpi else "gloo"
    job = Job(
        argv=argv,
        hosts=used,
        np=count,
        env={**_defaults(base), **selection.values},
        controller=controller,
        cwd=str(Path.cwd()),
        nics=nics,
        ssh=Ssh(ssh_port, ssh_identity_file, ssh_args),
        launcher_args=launcher_args,
        grace_s=grace,
        launch_dir=str((run_dir or Path("runs")) / "launch"),
    )
    if not no_relay:
        errors = str(RunDir(run_dir).errors) if run_dir is not None else ""
        job = relay.wrap(job, start=start_argv(sys.executable), errors=errors, share_devices=share_devices)
    choice = choose(launcher, environ=base)
    started = choice.launcher.command(job)
    if dry_run:
        click.echo(started.script(base))
        return 0
    if log_dir is None and run_dir is not None:
        log_dir = str(run_dir / "logs")
    style = output.Style(count, sys.stdout.isatty(), prefix, timestamps, quiet_ranks)
    return _run(started, base, job, run_dir, style, Path(log_dir) if log_dir else None)


def _run(
    started: Command, base: dict[str, str], job: Job, run_dir: Path | None, style: output.Style, log_dir: Path | None
) -> int:
    """Run the command, show what the ranks say, and turn a failure into a JobError that tells the earliest one."""
    since = time.time()
    watch = Watch(job.hosts)
    files = output.RankFiles(log_dir, job.np) if log_dir is not None else None

    def on_event(event: frames.Event, is_error: bool) -> None:
        watch.see(event)
        if isinstance(event, frames.Line):
            if files is not None:
                files.write(event)
            if style.shows(event):
                click.echo(style.render(event, time.time()), err=event.stream == "err")
        elif isinstance(event, frames.Note):
            if not watch.any_failed:  # what launchers say about a rank's failure is long, and less than what we know
                click.echo(event.text, err=is_error)
        elif isinstance(event, frames.Started) and watch.misplaced():
            raise JobError(
                f"the ranks are not where they were planned: {watch.misplaced()}", "did the launcher read the hosts?"
            )

    try:
        code = process.run(started, base, on_event)
    finally:
        if files is not None:
            files.close()
    found = watch.failures(RunDir(run_dir).errors if run_dir is not None else None, since)
    if not code and not found:
        return 0
    raise _job_error(found, code, watch, interrupted=code in (129, 130, 143) and not found)


def _job_error(found: Sequence[failures.Failure], code: int, watch: Watch, *, interrupted: bool) -> JobError:
    if interrupted:
        return JobError("the job was ended by a signal", exit_code=code)
    code = failures.exit_code(found, code)
    if found:
        return JobError(failures.report(found), found[0].hint, exit_code=code)
    missing, silent = watch.never_started(), watch.silent()
    if missing and silent != missing:
        some = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return JobError(
            f"the launcher ended with exit code {code}; these never started: {some}", "see its message above", exit_code=code
        )
    if silent:
        some = ", ".join(silent[:8]) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
        return JobError(
            f"the launcher ended with exit code {code}; no word from {some}",
            "is the host, or its network, down?",
            exit_code=code,
        )
    return JobError(f"the launcher ended with exit code {code}, no rank failed", "see its message above", exit_code=code)


def _hosts(hosts: str | None, path: str | None, np: int | None, strict: bool) -> hostfile.Hosts:
    if hosts is not None and path is not None:
        raise UsageError("both -H and --hostfile are given", "use one of them")
    if path is not None:
        return hostfile.read(path, strict=strict)
    if hosts is not None:
        return hostfile.parse_option(hosts, strict=strict)
    return hostfile.parse_option(f"localhost:{max(np or 1, 1)}")


def _recipe(what: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """The run directory and the command of a rank that trains a recipe."""
    recipe, *options = what
    path = recipe.partition(".py:")[0] + ".py" if ".py:" in recipe else recipe
    if path.endswith(".py") and not Path(path).is_file():
        raise UsageError(
            f"recipe '{path}' does not exist (looked in {Path(path).absolute().parent})", "check the path of the recipe"
        )
    if not path.endswith(".py") and ":" not in recipe:
        program = " (to start a program, put -- before it)" if shutil.which(recipe) or Path(recipe).exists() else ""
        raise UsageError(f"'{recipe}' is no recipe{program}", "name FILE.py, FILE.py:function or package.module:function")
    run_dir = _option(options, "--run-dir")
    if run_dir is None:
        name = Path(path).stem if path.endswith(".py") else recipe.replace(":", ".").rpartition(".")[2]
        run_dir = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        options = ["--run-dir", run_dir, *options]
    return Path(run_dir), (sys.executable, "-m", "hvdtrain", "train", recipe, *options)


def _option(words: list[str], name: str) -> str | None:
    """The value of an option that is meant for ``train``: the last one counts, as there."""
    found = None
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
        elif word == name and at + 1 < len(words):
            found = words[at + 1]
    return found


def _given(paths: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for path in paths:
        values.update(environment.read_file(path))
    return values


def _defaults(base: dict[str, str]) -> dict[str, str]:
    """What ranks get unless the user has set it. Threads are counted on each host, by the relay."""
    values = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return {name: base.get(name, value) for name, value in values.items()}
