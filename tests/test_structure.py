"""Modules import downwards only, and MergeKit's private names stay in one module."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mergekit_ram"

# From the bottom up: a module may import those before it.
ORDER = (
    "errors",
    "kinds",
    "overlap",
    "reference",
    "kernels._dtypes",
    "kernels._threads",
    "kernels._staging",
    "kernels._lanes",
    "kernels._numba",
    "kernels._cpu",
    "kernels._torch",
    "kernels",
    "_mergekit",
    "_mergekit.methods",
    "_mergekit.merging",
    "_mergekit.tokenizers",
    "_mergekit.planning",
    "parameters",
    "methods",
    "report",
    "advice",
    "record",
    "former",
    "tasks",
    "headers",
    "preflight.request",
    "preflight.models",
    "preflight.tensors",
    "preflight.plan",
    "preflight.output",
    "preflight",
    "planning",
    "_mergekit.commands",
    "verification",
    "table",
    "figure",
    "cli",
    "_extend",
    "_activate",
    "",
)


def modules() -> dict[str, ast.Module]:
    result = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        result[name] = ast.parse(file.read_text())
    return result


def imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {n for n in names if n.removeprefix("mergekit_ram.") in ORDER}
            found |= submodules or {node.module} | names
    return found


def test_modules_import_downwards_only() -> None:
    trees = modules()
    assert set(trees) == set(ORDER)
    for name, tree in trees.items():
        for imported in imports(tree):
            if imported.startswith("mergekit_ram."):
                other = imported.removeprefix("mergekit_ram.")
                if other in ORDER:
                    assert ORDER.index(other) < ORDER.index(name), f"{name} imports {other}"


def test_only_tests_import_the_reference() -> None:
    for name, tree in modules().items():
        assert "mergekit_ram.reference" not in imports(tree), name


def test_mergekits_private_names_are_touched_in_one_module() -> None:
    for name, tree in modules().items():
        if name.startswith("_mergekit") or name in ("kernels._lanes", "kernels._numba"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = node.value
                ours = isinstance(owner, ast.Name) and owner.id in (
                    "self",
                    "cls",
                    "other",
                    "left",
                    "right",
                    "_cpu",
                    "_torch",
                )
                dunder = node.attr.startswith("__")
                assert ours or dunder, f"{name}, line {node.lineno}: {ast.unparse(node)}"
