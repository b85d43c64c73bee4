"""The backend's installation: find, patch, build, cache and verify Horovod for what is installed here.

``require`` is for other code; the commands are in :mod:`hvdtrain.cli.horovod`. Importing this package imports no framework.
"""

from __future__ import annotations

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod import buildinfo

INSTALL_COMMAND = "hvdtrain horovod install"

__all__ = ["INSTALL_COMMAND", "require"]


def require(framework: str) -> None:
    """Raise HvdtrainError unless Horovod is installed and was built for the installed version of ``framework``.

    Cheap: reads two small files, imports nothing and starts no process, so each rank can call it.
    ``framework`` is "torch", "tensorflow" or "mxnet".
    """
    folder = buildinfo.package_folder()
    if folder is None:
        raise HvdtrainError("Horovod is not installed in this environment", INSTALL_COMMAND)
    info = buildinfo.read_build_info(folder)
    if not info.ours and not info.frameworks and buildinfo.has_extension(folder, framework):
        return  # another tool's build without records: the extension is there, so importing it will tell
    problem = buildinfo.mismatch(info, framework, buildinfo.installed_version(framework))
    if not problem and not buildinfo.has_extension(folder, framework):
        problem = f"its extension for {framework} is missing"
    if problem:
        raise HvdtrainError(f"Horovod {info.horovod} in this environment cannot be used: {problem}", _mend(framework))


def _mend(framework: str) -> str:
    if buildinfo.installed_version(framework) is None:
        return f"install {framework}, then run '{INSTALL_COMMAND}'"
    return INSTALL_COMMAND
