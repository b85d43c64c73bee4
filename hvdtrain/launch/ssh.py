"""A small program that stands between a launcher and ssh.

horovodrun and Hydra call ``ssh`` by themselves. horovodrun lets nobody say how (and turns the check of host keys off), Hydra's
options differ from one MPI to the next, and neither notices a host that lost its power or its cable: TCP waits for it for
hours. So they are given a program of this name that calls the real one as the user said, with keepalive.
"""

from __future__ import annotations

import shlex

from hvdtrain.errors import UsageError
from hvdtrain.launch import Job

#: A host whose ssh server says nothing for 20 s is gone. After the user's own options: ssh takes the first word on a matter.
_KEEPALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")

_FOR_HOROVODRUN = """\
#!/bin/sh
# ssh as hvdtrain run was told to use it. Horovod's word against checking host keys is dropped: the ssh configuration decides.
for word do
  shift
  [ "$word" = StrictHostKeyChecking=no ] && word=BatchMode=yes
  set -- "$@" "$word"
done
exec {ssh} "$@"
"""

_FOR_HYDRA = """\
#!/bin/sh
# ssh as hvdtrain run was told to use it. mpirun does not look at how it ends, so a connection that is lost ends mpirun:
# politely, which ends the ranks that it still reaches, and then by force, for it would wait for the others.
{ssh} "$@" <&0 &
ssh=$!
trap 'kill $ssh' HUP INT TERM
wait $ssh
code=$?
for signal in TERM KILL; do
  read -r _ _ _ parent _ < /proc/$$/stat
  [ $code = 255 ] && [ "$parent" = "$PPID" ] && kill -$signal "$PPID" && sleep 2
done
exit $code
"""


def for_horovodrun(job: Job, program: str) -> tuple[str, str]:
    """(path, text) of the program; its folder is to be the first on horovodrun's PATH. ``program`` is the real ssh.

    UsageError for a folder that PATH cannot hold.
    """
    if ":" in job.launch_dir:
        raise UsageError(f"PATH can hold no folder with ':' in its name ({job.launch_dir})", "set TMPDIR to another one")
    return job.file("ssh"), _FOR_HOROVODRUN.format(ssh=_command(job, program))


def for_hydra(job: Job, program: str) -> tuple[str, str]:
    """(path, text) of the program for ``-launcher-exec``. UsageError for a path that Hydra would split."""
    path = job.file("ssh")
    if len(path.split()) > 1:
        raise UsageError(f"MPICH's mpirun can use no folder with blanks in its name ({path})", "set TMPDIR to another one")
    return path, _FOR_HYDRA.format(ssh=_command(job, program))


def _command(job: Job, program: str) -> str:
    return shlex.join([program, *job.ssh.argv(), *_KEEPALIVE])
