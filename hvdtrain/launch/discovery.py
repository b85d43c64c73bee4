"""The script that prints the hosts of an elastic job: run once before the start, where its mistakes can be explained.

Horovod's driver runs it every second from then on. If it fails the first time, the driver hangs up with a traceback; if it fails
later, it is tried again.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from hvdtrain.errors import UsageError, shown
from hvdtrain.launch import hostnames

_LIMIT_S = 30.0
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_HINT = "it must print a line host:slots for each host that can be used now, and end with exit code 0"


def warnings(script: str, least: int, folder: Path) -> list[str]:
    """What is to be told about the hosts that ``script`` names now, where ``least`` ranks are needed to begin.

    Raises:
        UsageError: it fails, does not end, or prints what is no host.
    """
    try:
        # As the driver does: a script without a first line #!/bin/sh is the shell's.
        done = subprocess.run(
            ["/bin/sh", "-c", shlex.quote(script)], cwd=folder, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"the host discovery script {script} does not end within {_LIMIT_S:.0f} s", _HINT) from None
    if done.returncode:
        said = next((f": {shown(line)}" for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        raise UsageError(f"the host discovery script {script} ends with exit code {done.returncode}{said}", _HINT)
    slots, bad = 0, []
    for number, line in enumerate(done.stdout.splitlines(), 1):
        if not line:
            continue
        name, _, count = line.partition(":")
        try:
            hostnames.check(name)
            if _COUNT.fullmatch(count) is None:
                raise UsageError(f"it is no host:slots: '{shown(line)}'")
            slots += int(count)
        except UsageError as error:
            bad.append(f"line {number} of what it prints: {error.message}")
    if bad:
        raise UsageError(f"the host discovery script {script}: {'; '.join(bad[:8])}", _HINT)
    if slots < least:
        return [f"the host discovery script names {slots} slots now; the job begins with {least}"]
    return []
