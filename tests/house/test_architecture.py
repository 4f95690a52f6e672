"""Architecture rules (docs/design/architecture.md): imports go to lower layers only, and some packages never import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.house.parsed import below, parsed

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
LAYERS = {
    "spec": 0,
    "durable": 0,
    "families": 0,
    "config": 1,
    "workload": 1,
    "costs": 1,
    "schedules": 1,
    "events": 1,
    "policies": 1,
    "models": 1,
    "kernels": 1,
    "data": 1,
    "state": 1,
    "connections": 1,
    "simulator": 2,
    "parallel": 2,
    "optim": 2,
    "calibration": 2,
    "planner": 3,
    "profile": 3,
    "checkpoint": 3,
    "observe": 3,
    "diagnosis": 3,
    "training": 4,
    "serve": 4,
    "rl": 4,
    "preferences": 4,
    "launch": 5,
    "chaos": 5,
    "server": 5,
    "cli": 6,
}
SAME_LAYER = {
    ("models", "kernels"),
    ("durable", "spec"),
    ("families", "spec"),
    ("data", "policies"),
    ("costs", "config"),
    ("costs", "workload"),
    ("costs", "schedules"),
    ("workload", "schedules"),
    ("workload", "config"),
    ("training", "rl"),
    ("training", "preferences"),
    ("rl", "serve"),
}
TORCH_FREE = (
    "spec",
    "families",
    "config",
    "workload",
    "durable",
    "costs",
    "schedules",
    "events",
    "connections",
    "policies",
    "simulator",
    "planner",
    "diagnosis",
    "calibration",
    "launch",
    "chaos",
    "server",
)
FLUSHES = {"fsync", "fdatasync", "sync", "rename", "renames", "replace"}
"""Functions of `os` that only the package `durable` calls."""


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every meshwright import, also those inside functions."""
    modules = []
    for node in below(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.append((node.lineno, node.module))
            modules += [
                (node.lineno, f"{node.module}.{alias.name}") for alias in node.names if node.module == "meshwright"
            ]
        elif isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
    return modules


def test_imports_go_to_lower_layers_only() -> None:
    wrong = []
    for path in files():
        package = path.relative_to(SOURCE).parts[0]
        if package.endswith(".py"):
            continue
        for line, module in imports(path):
            other = module.split(".")[1] if module.startswith("meshwright.") else None
            if other not in LAYERS or other == package or (package, other) in SAME_LAYER:
                continue
            if LAYERS[other] >= LAYERS[package]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} ({package}, layer {LAYERS[package]}) imports {module}")
    assert not wrong, "\n".join(wrong)


def test_parts_of_the_checkpoint_package_are_used_in_one_direction() -> None:
    used = {
        "format": set(),
        "read": {"format"},
        "memory": {"format", "read"},
        "write": {"format", "read", "memory"},
        "mirror": {"format"},
        "models": {"format", "read", "write"},
    }
    package = SOURCE / "checkpoint"
    assert {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"} == used.keys()
    wrong = []
    for path in files():
        if package not in path.parents or path.parent == package:
            continue
        folder = path.parent.name
        for line, module in imports(path):
            other = module.removeprefix("meshwright.checkpoint.").split(".")[0]
            if other in used and other != folder and other not in used[folder]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_predict_imports_calibration() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in files()
        if path.parent.name != "calibration"
        and any(module.startswith("meshwright.calibration") for _, module in imports(path))
    }
    assert users == {"cli/predict.py"}


def test_engine_does_not_import_costs() -> None:
    """The engine follows the plan and the rules of `workload`; `costs` prices them."""
    users = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in files()
        if path.relative_to(SOURCE).parts[0] in ("parallel", "optim", "kernels", "models", "schedules")
        for line, module in imports(path)
        if module.startswith("meshwright.costs")
    ]
    assert not users


def test_training_and_launch_run_without_the_inference_engine() -> None:
    users = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in files()
        if path.relative_to(SOURCE).parts[0] in ("training", "launch")
        for line, module in imports(path)
        if module.startswith("meshwright.serve")
    ]
    assert not users


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set(LAYERS)


def test_torch_free_packages_import_without_torch() -> None:
    modules = [
        ".".join(("meshwright", *path.relative_to(SOURCE).with_suffix("").parts))
        for package in TORCH_FREE
        for path in (SOURCE / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert {module.split(".")[1] for module in modules} == set(TORCH_FREE)
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {module}" for module in modules)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


PLAN_COMMAND = "plan model=llama3-8b cluster.gpu=H100 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=16"


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], PLAN_COMMAND.split()])
def test_help_and_plan_need_no_torch(words: list[str]) -> None:
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['meshwright', *{words!r}]\n"
        "from meshwright.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_pickle_is_read() -> None:
    forbidden = ("pickle", "dill", "cloudpickle", "marshal", "shelve")
    wrong = []
    for path in files():
        wrong += [f"{path}:{line} {module}" for line, module in imports(path) if module.split(".")[0] in forbidden]
        text = path.read_text(encoding="utf-8")
        wrong += [
            f"{path}: {call}"
            for call in ("torch.load(", "torch.save(", "yaml.load(", "eval(", "exec(")
            if f" {call}" in text
        ]
    assert not wrong, "\n".join(wrong)


def test_only_durable_flushes_and_renames() -> None:
    wrong = []
    for path in files():
        if path.parent.name == "durable":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                wrong += [f"{path}:{node.lineno} {alias.name}" for alias in node.names if alias.name in FLUSHES]
            elif isinstance(node, ast.Attribute) and node.attr in FLUSHES and ast.unparse(node.value) == "os":
                wrong.append(f"{path}:{node.lineno} os.{node.attr}")
            elif isinstance(node, ast.Call) and _renames_path(node):
                wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def _renames_path(call: ast.Call) -> bool:
    """Whether this is a call of `Path.rename` or `Path.replace`; `str.replace` takes two values."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    return name == "rename" or (name == "replace" and len(call.args) == 1 and not call.keywords)


def test_nothing_reads_outside_the_repository() -> None:
    root = SOURCE.parents[1]
    paths = [*root.glob("src/**/*.py"), *root.glob("benchmarks/**/*"), *root.glob("docs/**/*.md"), root / "Makefile"]
    outside = "../" + "shared"
    assert not [
        str(path) for path in paths if path.is_file() and outside in path.read_text(encoding="utf-8", errors="ignore")
    ]


def test_fewer_than_ten_base_dependencies() -> None:
    import tomllib

    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) < 10
    constraints = (SOURCE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    assert "//" not in constraints
