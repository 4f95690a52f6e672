"""What `parallel` and `serve` may replace in a model: functions only through `BlockHooks`, modules only those listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from tests.house.parsed import parsed
from tests.house.test_architecture import SOURCE, TORCH_FREE, files

REPLACED = {
    "parallel/stages.py": {"embed", "positions", "norm", "head", "predictions", "attribute"},
    "parallel/tensor.py": {"embed", "positions", "head", "attribute"},
    "parallel/tensor_inference.py": {"embed", "head"},
    "parallel/experts.py": {"experts"},
    "parallel/expert_inference.py": {"experts"},
    "parallel/fsdp.py": {"name"},
    "serve/formats.py": {"name", "'mlp'", "'experts'", "'head'"},
}
"""Modules of a decoder that a file replaces by this rank's part of them or by another format, or removes, and variables that name
parameters and linear layers."""


def models() -> Iterator[ast.Module]:
    return (parsed(path) for path in files() if path.parent == SOURCE / "models")


@cache
def callables() -> frozenset[str]:
    """Names of methods of classes in `models`, of fields of `BlockHooks`, and of other attributes annotated as callable."""
    names = set()
    for node in (node for tree in models() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(node.annotation):
            names.add(ast.unparse(node.target).rpartition(".")[2])
    return frozenset(names)


@cache
def modules() -> frozenset[str]:
    """Names that `models` gives to modules: `self.name = Class(…)`, also one of two cases."""
    classes = {node.name for tree in models() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names = set()
    for target, value in (pair for tree in models() for pair in assignments(tree)):
        called = {ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(value) if isinstance(call, ast.Call)}
        if called & {*classes, "Linear", "ModuleDict", "ModuleList", "feed_forward_of"}:
            names.add(target.attr)
    return frozenset(names - {"hooks"})


def assignments(tree: ast.Module) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """Attributes to which a file assigns, with the value; of a tuple each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield part, node.value


@cache
def outside() -> tuple[tuple[str, ast.Attribute], ...]:
    """File and target of each assignment to an attribute of another object, in packages that can have a module."""
    found = []
    for path in files():
        name = path.relative_to(SOURCE)
        if name.parts[0] not in (*TORCH_FREE, "models"):
            targets = (target for target, _ in assignments(parsed(path)))
            found += [(str(name), target) for target in targets if ast.unparse(target.value) != "self"]
    return tuple(found)


def test_functions_of_models_are_replaced_through_hooks_only() -> None:
    assert {"forward", "compute", "attend", "gather_tokens", "run"} <= callables()
    wrong = [
        f"{name}:{target.lineno} {ast.unparse(target)}: add a field to models.hooks.BlockHooks and assign that"
        for name, target in outside()
        if target.attr in callables() and not ast.unparse(target.value).endswith("hooks")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_hook_is_described_replaced_and_called() -> None:
    classes = [node for tree in models() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    (hooks,) = [node for node in classes if node.name == "BlockHooks"]
    fields = [ast.unparse(node.target) for node in hooks.body if isinstance(node, ast.AnnAssign)]
    after = [node for before, node in pairwise(hooks.body) if isinstance(before, ast.AnnAssign)]
    assert len(after) == len(fields) and all(isinstance(node, ast.Expr) for node in after)
    replaced = {target.attr for _, target in outside() if ast.unparse(target.value).endswith("hooks")}
    called = {
        node.func.attr
        for tree in models()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value).endswith("hooks")
    }
    assert set(fields) == replaced == called


def calls(package: str) -> Iterator[tuple[str, ast.Call, str]]:
    """File, call and name of the called function, of all calls in a package."""
    for path in files():
        if path.parent.name == package:
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call):
                    yield str(path.relative_to(SOURCE)), node, ast.unparse(node.func)


def test_no_forward_has_a_hook_of_torch() -> None:
    """They would be a second list, and change what a module returns without a trace in its code."""
    found = [
        f"{name}:{call.lineno}"
        for package in ("parallel", "serve", "training", "checkpoint")
        for name, call, function in calls(package)
        if function.rpartition(".")[2] in ("register_forward_hook", "register_forward_pre_hook")
    ]
    assert not found


def test_modules_are_replaced_in_the_listed_files_only() -> None:
    assert {"embed", "head", "experts", "attention", "qkv", "mlp", "shared"} <= modules()
    found: dict[str, set[str]] = {}
    for name, target in outside():
        if name.startswith(("parallel", "serve")) and target.attr in modules():
            found.setdefault(name, set()).add(target.attr)
    for package in ("parallel", "serve"):
        for name, call, function in calls(package):
            if function == "setattr" or (function.endswith("add_module") and not function.startswith("self.")):
                found.setdefault(name, set()).add(ast.unparse(call.args[1 if function == "setattr" else 0]))
    assert found == REPLACED
