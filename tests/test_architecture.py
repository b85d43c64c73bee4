"""The floors of the design: imports go down or sideways, never up, and each heavy library has its home."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.cli import COMMANDS

ROOT = Path(__file__).parents[1] / "hvdtrain"

#: module (or package, without its __init__) -> floor; the longest name that fits counts
FLOORS = {
    "cli": 4,
    "": 4,  # hvdtrain/__init__.py and __main__.py: the face of the package
    "trainer": 3,
    "place": 2,
    "handover": 2,
    "window": 2,
    "script": 3,
    "torch": 3,
    "keras": 3,
    "worker": 3,
    "elastic": 3,
    "rank": 3,
    "devices": 2,
    "run_json": 3,
    "watchdog": 2,
    "votes": 2,
    "adapters": 3,
    "bench": 3,
    "bench.results": 1,
    "tune": 3,
    "comm": 2,
    "data": 2,
    "callbacks": 2,
    "loggers": 2,
    "checkpoint": 2,
    "consistency": 2,
    "horovod": 2,
    "launch": 2,
    "comm.__init__": 1,
    "compression": 2,
    "compression.__init__": 1,
    "adapters.__init__": 1,
    "callbacks.__init__": 1,
    "loggers.__init__": 1,
    "launch.__init__": 1,
    "data.__init__": 1,
    "data.sampler": 1,
    "launch.dialects": 1,
    "launch.hostfile": 1,
    "launch.hostnames": 1,
    "launch.inputfile": 1,
    "launch.nodelist": 1,
    "pipeline": 1,
    "pipeline.execute": 2,
    "pipeline.files": 2,
    "pipeline.adapter": 3,
    "recipe": 1,
    "config": 1,
    "errors": 0,
    "world": 0,
    "metrics": 0,
    "state": 0,
    "lr": 0,
    "update": 0,
    "exchange": 0,
    "rundir": 0,
    "progress": 0,
    "startup": 0,
    "clock": 0,
    "stops": 0,
}

#: library -> modules that may import it
HOMES = {
    "torch": {
        "adapters.torch",
        "adapters.torch_choice",
        "adapters.torch_compressed",
        "adapters.torch_exchange",
        "adapters.torch_files",
        "adapters.torch_fused",
        "adapters.torch_layers",
        "adapters.torch_loop",
        "adapters.torch_metrics",
        "adapters.torch_norm",
        "adapters.torch_parts",
        "adapters.torch_pipeline",
        "adapters.torch_reducer",
        "adapters.torch_shared",
        "adapters.torch_state",
        "bench.carriers",
        "comm.horovod",
        "data.torch",
        "data.torch_dataset",
        "torch",
    },
    "tensorflow": {
        "adapters.keras",
        "adapters.keras_batches",
        "adapters.keras_compressed",
        "adapters.keras_files",
        "adapters.keras_fit",
        "adapters.keras_layers",
        "adapters.keras_norm",
        "adapters.keras_parts",
        "adapters.keras_passes",
        "adapters.keras_recorded",
        "adapters.keras_pipeline",
        "adapters.keras_reducer",
        "adapters.keras_shared",
        "adapters.keras_state",
        "adapters.keras_traced",
        "adapters.keras_update",
        "bench.carriers",
        "comm.horovod",
        "keras",
    },
    "keras": {
        "adapters.keras",
        "adapters.keras_compressed",
        "adapters.keras_files",
        "adapters.keras_fit",
        "adapters.keras_layers",
        "adapters.keras_metrics",
        "adapters.keras_norm",
        "adapters.keras_parts",
        "adapters.keras_passes",
        "adapters.keras_recorded",
        "adapters.keras_pipeline",
        "adapters.keras_shared",
        "keras",
    },
    "safetensors": {"adapters.torch_files", "adapters.torch_parts", "adapters.keras_parts"},
    "horovod": {"adapters.torch_reducer", "adapters.keras_reducer", "bench.carriers", "comm.driver", "comm.horovod"},
    "mpi4py": {"comm.buffers", "comm.mpi"},
    "tensorboard": {"loggers.tensorboard"},
    "click": {"cli"},
    "rich": {"cli", "loggers.console"},
}

MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in ROOT.rglob("*.py"))


def floor_of(module: str) -> int:
    name = module
    while name not in FLOORS:
        name = name.rpartition(".")[0]
    if name == "" and module not in ("__init__", "__main__"):
        pytest.fail(f"hvdtrain/{module}.py has no floor yet: add it to FLOORS")
    return FLOORS[name]


def test_the_floors_in_the_documentation_have_every_module():
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    floors = dict(re.findall(r"^(\d) \w+ +((?:.|\n(?= ))+)", text, re.MULTILINE))
    for module in MODULES:
        if "." not in module and not module.startswith("__"):
            assert re.search(rf"\b{module}\b", floors[str(FLOORS[module])]), f"docs/architecture.md: {module} is missing"


def imports(module: str) -> Iterator[str]:
    """Every module that ``module`` imports anywhere in its text, with relative names made absolute."""
    for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"hvdtrain.{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> str | None:
    """The module of ours that an imported name belongs to."""
    parts = name.split(".")[1:]
    while True:
        if parts and (ROOT.joinpath(*parts).with_suffix(".py")).is_file():
            return ".".join(parts)
        if (ROOT.joinpath(*parts) / "__init__.py").is_file():
            return ".".join([*parts, "__init__"])
        if not parts:
            return None
        parts.pop()


def is_under(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


@pytest.mark.parametrize("module", MODULES)
def test_imports_never_go_up(module):
    for name in imports(module):
        target = ours(name) if name.split(".")[0] == "hvdtrain" else None
        if target is not None and target != module:
            assert floor_of(target) <= floor_of(module), f"hvdtrain.{module} imports hvdtrain.{target} from a higher floor"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_in_their_own_home_only(module):
    for name in imports(module):
        places = HOMES.get(name.split(".")[0])
        assert places is None or is_under(module, places), f"hvdtrain.{module} imports {name}"


@pytest.mark.parametrize("module", [module for module in MODULES if "." not in module and FLOORS.get(module) == 0])
def test_the_lowest_floor_needs_the_standard_library_only(module):
    for name in imports(module):
        top = name.split(".")[0]
        assert top == "hvdtrain" or top in sys.stdlib_module_names, f"hvdtrain.{module} imports {name}"


def test_commands_do_not_import_each_other():
    for module in MODULES:
        if module.startswith("cli.") and module != "cli.__init__":
            targets = {ours(name) for name in imports(module) if name.startswith("hvdtrain.cli.")}
            commands = {f"cli.{name}" for name, _ in COMMANDS.values()} - {module}
            assert not targets & commands, f"hvdtrain.{module} imports {targets & commands}"


HEAVY = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "sklearn")


@pytest.mark.parametrize(
    "statement",
    [
        "import hvdtrain; hvdtrain.Recipe",
        "from hvdtrain.cli import main; main(['--help'])",
        "from hvdtrain.cli import main; main(['run', '--help'])",
        "from hvdtrain.cli import main; main(['train', '--help'])",
        "from hvdtrain.cli import main; main(['horovod', '--help'])",
        "from hvdtrain.cli import main; main(['checkpoint', 'verify', 'nothing'])",
        "from hvdtrain.cli import main; main(['run', '-np', '2', '--dry-run', '--', 'true'])",
    ],
)
def test_no_framework_is_imported_before_it_is_needed(statement):
    code = f"import sys; {statement}; print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "HEAVY []" in result.stdout, result.stdout + result.stderr
