"""The installed frameworks' binary facts: version, C++ ABI, CUDA. Each framework is asked in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.shell import Result, run

_QUESTIONS = {
    "torch": """
import json, torch
print(json.dumps({"cxx11_abi": bool(torch.compiled_with_cxx11_abi()), "cuda": torch.version.cuda}))
""",
    "tensorflow": """
import json, tensorflow as tf
flags = " ".join(tf.sysconfig.get_compile_flags())
info = tf.sysconfig.get_build_info()
print(json.dumps({"cxx11_abi": "_GLIBCXX_USE_CXX11_ABI=1" in flags,
                  "cuda": info.get("cuda_version") if info.get("is_cuda_build") else None}))
""",
    "mxnet": """
import json, mxnet
print(json.dumps({"cxx11_abi": True, "cuda": "yes" if mxnet.runtime.Features().is_enabled("CUDA") else None}))
""",
}


@dataclass(frozen=True)
class Framework:
    """An installed framework as far as a build cares."""

    name: str
    version: str
    cxx11_abi: bool = True
    cuda: str | None = None
    """the CUDA version it was built with; None for a CPU build"""

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({'CUDA ' + self.cuda if self.cuda else 'CPU'})"


def ask_frameworks(versions: Mapping[str, str]) -> tuple[Framework, ...]:
    """Ask each framework of ``versions`` (name -> installed version), side by side; about four seconds for both."""
    with ThreadPoolExecutor(max_workers=max(1, len(versions))) as pool:
        answers = pool.map(_ask, versions)
        return tuple(_read(name, version, answer) for (name, version), answer in zip(versions.items(), answers, strict=True))


def _ask(name: str) -> Result:
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "0")}
    return run([sys.executable, "-P", "-c", _QUESTIONS[name]], env=env, timeout_s=300, apart=True)


def _read(name: str, version: str, answer: Result) -> Framework:
    if not answer.ok:
        reason = last_line(answer.errors) or f"exit code {answer.code}"
        hint = f"try 'python -c \"import {name}\"' in this environment, and reinstall {name} if that fails"
        raise HvdtrainError(f"{name} {version} is installed but cannot be imported: {reason}", hint)
    values = json.loads(last_line(answer.output))
    return Framework(name, version, cxx11_abi=values["cxx11_abi"], cuda=values["cuda"])


def last_line(text: str) -> str:
    """The last line that says something."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
