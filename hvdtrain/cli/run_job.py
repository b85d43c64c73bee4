"""From the options of ``hvdtrain run`` to the job: its hosts, what every rank runs and gets, and over which network they meet."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli import forecast, train_words, tuned
from hvdtrain.cli.work import Work, is_file
from hvdtrain.errors import UsageError
from hvdtrain.launch import (
    Controller,
    Elastic,
    Host,
    Job,
    Ssh,
    allocation,
    defaults,
    detect,
    environment,
    failures,
    filters,
    fit,
    hostfile,
    nics,
    placement,
    probe,
    relay,
    resources,
    start_argv,
)
from hvdtrain.stops import STARTED

if TYPE_CHECKING:
    from hvdtrain.config import Config

#: How whatever we set is set otherwise.
_OVERRIDDEN = "unless you set them (export NAME=VALUE, --env NAME=VALUE, --env-file):"


def hosts_of(base: dict[str, str], options: Mapping[str, Any]) -> tuple[tuple[Host, ...], Elastic | None, int]:
    """The hosts as they will be used, and the number of ranks."""
    restarts = options["max_restarts"] and not options["host_discovery_script"]
    if restarts and options["max_np"] is not None:
        raise UsageError("--max-np is for elastic jobs, and a restart never has more ranks than -np", "leave --max-np out")
    elastic = _elastic(
        None if restarts else options["min_np"], options["max_np"], options["host_discovery_script"], options["np"]
    )
    np: int | None = options["np"] if options["np"] is not None or elastic is None else elastic.min_np
    listed = allocation.hosts(base, options["hosts"], options["hostfile"], strict=options["strict"])
    if listed is None:
        listed = hostfile.Hosts((Host("localhost", max(np or 1, 1)),), "this machine")
    warn(listed.warnings)
    kept = filters.apply(listed.hosts, options["include"], options["exclude"])
    count = sum(host.slots for host in kept) if np is None else np
    anyway = options["oversubscribe"] or elastic is not None
    if restarts and (options["min_np"] or 0) > count:
        raise UsageError(
            f"--min-np {options['min_np']} is more than the {count} ranks of the job", "lower --min-np, or raise -np"
        )
    used = fit(kept, count, source=listed.source, oversubscribe=anyway)
    if elastic is None and filters.unused(listed.hosts, used):
        click.secho(filters.unused_text(listed.hosts, used), err=True, dim=True)
    return used, elastic, count


def _elastic(min_np: int | None, max_np: int | None, script: str | None, np: int | None) -> Elastic | None:
    if script is None:
        if min_np is not None or max_np is not None:
            raise UsageError(
                "--min-np and --max-np need to know the hosts as they come and go",
                "add --host-discovery-script FILE, or with --min-np alone --max-restarts N",
            )
        return None
    if not os.access(script, os.X_OK) or not is_file(script):
        raise UsageError(f"host discovery script '{script}' is not there or not executable", f"try: chmod +x {script}")
    least = min_np or np or 1
    if max_np is not None and max_np < least:
        raise UsageError(f"--max-np {max_np} is less than --min-np {least}", "raise --max-np")
    return Elastic(least, max_np, str(Path(script).absolute()))


def job_of(
    work: Work, hosts: tuple[Host, ...], elastic: Elastic | None, np: int, base: dict[str, str], options: Mapping[str, Any]
) -> Job:
    selection, controller = _selection(base, options), _controller(elastic, options)
    warn(environment.check_controller(base, selection.values, controller))
    told = {failures.JOB_VARIABLE: secrets.token_hex(4)} if work.is_recipe else {}
    if work.is_recipe and options["started"] is not None:  # a command that is printed may be used later
        told[STARTED] = str(options["started"])
    job = Job(
        argv=work.argv,
        hosts=hosts,
        np=np,
        env={**selection.values, **told},
        controller=controller,
        cwd=str(Path.cwd()),
        nics=options["nic"],
        ssh=_ssh(options),
        launcher_args=options["launcher_arg"],
        launch_dir=options["launch_dir"],
        elastic=elastic,
        grace_s=_grace_s(work, base, options),
        stop_s=options["stop_timeout"] if work.is_recipe else 0.0,
        here=detect.own_names(),
    )
    if job.is_remote and selection.left_out:
        names = "; ".join(f"{name} ({why})" for name, why in selection.left_out.items())
        click.secho(f"not sent to other hosts: {names}", err=True, dim=True)
    if options["no_relay"]:
        lost = {"--log-dir": options["log_dir"], "a choice of devices": any(host.devices for host in hosts)}
        for what in (what for what, wanted in lost.items() if wanted):
            raise UsageError(f"{what} needs the relay, and --no-relay leaves it out", "leave one of the two out")
        return replace(job, stop_s=0.0)
    return relay.wrap(job, start=start_argv(sys.executable), share_devices=options["share_devices"])


def _grace_s(work: Work, base: Mapping[str, str], options: Mapping[str, Any]) -> float:
    """Slurm tells the ranks themselves to end, with SIGTERM: those of a recipe stop in order then, which takes its time."""
    given: float = options["grace"]
    return max(given, options["stop_timeout"]) if work.is_recipe and "SLURM_JOB_ID" in base else given


def _ssh(options: Mapping[str, Any]) -> Ssh:
    unchecked = ("-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null") if options["no_host_key_check"] else ()
    return Ssh(options["ssh_port"], options["ssh_identity_file"], (*unchecked, *options["ssh_arg"]))


def ask(hosts: tuple[Host, ...], work: Work, options: Mapping[str, Any]) -> list[probe.Answer]:
    files = [work.recipe] if work.recipe else []
    return probe.ask(hosts, _ssh(options), start_argv(sys.executable), str(Path.cwd()), files)


def probed(job: Job, work: Work, options: Mapping[str, Any], *, dry_run: bool) -> Job:
    """The job with its network interface, after every host has said that it can take part."""
    answers = ask(job.hosts, work, options)
    bad, wanted = probe.problems(answers, job.cwd), options["nic"]
    if bad:
        error = probe.error(bad, len(answers))
        if not dry_run:
            raise error
        warn([str(error)])
        return replace(job, nics=tuple(wanted))
    warn(probe.differences(answers))
    tables = {answer.host: answer.interfaces for answer in answers}
    chosen = nics.check(wanted, tables) if wanted else nics.choose(tables)
    warn(chosen.warnings)
    click.secho(f"network: {chosen.reason}", err=True, dim=True)
    return replace(job, nics=chosen.names, subnet=chosen.subnet)


def defaults_of(
    job: Job, work: Work, found: detect.Found, choice: detect.Choice, base: Mapping[str, str], over: tuned.Overlay
) -> tuple[defaults.Setting, ...]:
    """What all ranks get unless the user has set it. ``over`` lies over it, and has nothing of what the user has set."""
    open_mpi = job.controller == "mpi" and found.mpi is not None and found.mpi.kind == "openmpi"
    open_mpi = open_mpi and choice.launcher.name != "jsrun"  # it starts the ranks of another MPI
    chooses = open_mpi and defaults.chooses_algorithms(
        {**base, **job.env, **over.variables},
        job.launcher_args,
        defaults.parameter_files(found.mpi.prefix if found.mpi else "", base.get("HOME", found.home)),
    )
    facts = defaults.JobFacts(is_recipe=work.is_recipe, open_mpi=open_mpi, chooses_algorithms=chooses)
    return defaults.laid_over(defaults.unset(defaults.of_job(facts), base, job.env), over.variables, over.reason)


def config_of(
    words: Sequence[str],
    hosts: Sequence[Host],
    elastic: Elastic | None,
    base: Mapping[str, str],
    options: Mapping[str, Any],
) -> Config:
    """What ranks that run ``hvdtrain train WORDS`` will train, without what was tuned.

    Raises:
        UsageError: each of them would refuse it.
    """
    environ = {**base, **_selection(base, options).values}
    config = train_words.config(click.get_current_context(), words, environ)
    train_words.judge(config, hosts)
    forecast.choice(config.options.exchange_wanted, hosts, _controller(elastic, options), elastic=elastic is not None)
    return config


def _selection(base: Mapping[str, str], options: Mapping[str, Any]) -> environment.Selection:
    given: dict[str, str] = {}
    for path in options["env_file"]:
        given.update(environment.read_file(path))
    return environment.select(base, options["env"], given)


def _controller(elastic: Elastic | None, options: Mapping[str, Any]) -> Controller:
    return "mpi" if options["mpi"] and elastic is None else "gloo"


def tuned_of(
    config: Config | None,
    job: Job,
    hosts: tuple[Host, ...],
    found: detect.Found,
    base: Mapping[str, str],
    options: Mapping[str, Any],
) -> tuned.Overlay:
    """What ``hvdtrain tune`` has stored for this recipe on these hosts."""
    if config is None or job.elastic is not None or options["no_tuned"]:
        return tuned.Overlay()
    over = tuned.look_up(config, hosts, job.controller, str(found.mpi or ""), {**base, **job.env})
    warn([over.warning] if over.warning else [])
    if over.text:
        click.secho(over.text, err=True, dim=True)
    return over


def notes(
    job: Job, config: Config | None, over: tuned.Overlay, given: Sequence[defaults.Setting], base: Mapping[str, str]
) -> list[str]:
    """What is to be told beside the printed command: the variables that were not the user's words, each with its reason."""
    told = [f"in the command below, {_OVERRIDDEN}", *map(str, given)] if given else []
    if failures.JOB_VARIABLE in job.env:
        name = f"{failures.JOB_VARIABLE}={job.env[failures.JOB_VARIABLE]}"
        told.append(f"{name}: by it the last words of this job's ranks are told from those of an earlier one")
    if job.nics and "NCCL_SOCKET_IFNAME" not in job.env:
        told.append(f"NCCL_SOCKET_IFNAME={','.join(job.nics)}: the network interface that was chosen, or named by --nic")
    of_hosts = host_notes(job, base)
    if of_hosts:
        told += [
            f"not in the command: the relay (start.py relay) sets these for the ranks of its host, {_OVERRIDDEN}",
            *of_hosts,
        ]
    if config is not None:
        wanted = replace(config.options.exchange_wanted, **over.exchange)
        told.append(forecast.text(forecast.choice(wanted, job.hosts, job.controller, elastic=job.elastic is not None)))
    return told


def host_notes(job: Job, base: Mapping[str, str]) -> list[str]:
    """What the relay of each rank will add, as far as this host can tell."""
    if not job.tagged:
        return []
    cpus = resources.usable_cpus(resources.affinity())
    environ = {**({} if job.is_remote else base), **job.env, "HOROVOD_CONTROLLER": job.controller}
    where = ", as on this machine; each host says for itself" if job.is_remote else ""
    return [f"{each}{where}" for each in placement.settings(environ, cpus, job.hosts[0].slots)]


def warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        click.secho(f"Warning: {sentence}", err=True, fg="yellow")
