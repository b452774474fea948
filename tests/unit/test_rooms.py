"""The rooms import each other one way: cli -> reports -> dynscope <- hooks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    # room: (what its modules may not import, what not even their functions may import)
    "dynscope": (("torch", "plotly", "dynscope.hooks", "dynscope.reports"), ("plotly",)),
    "hooks": (("plotly", "h5py", "dynscope.reports"),) * 2,
    "reports": (("torch", "h5py", "dynscope.hooks"),) * 2,
}
# Inside functions only these may reach into the other rooms …
DOORS = {"dynscope.hooks": ("__init__", "cli"), "dynscope.reports": ("__init__", "cli", "run")}
TORCH_READERS = (
    "torch_file",
    "distributed",
)  # … and only the readers of checkpoints may import torch
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_hook")


def files(room: str) -> list[Path]:
    """A room's modules and those of its sub-packages; the links to other rooms are not followed."""
    inner = (f for f in (ROOT / room).iterdir() if f.is_dir() and not f.is_symlink())
    return sorted(file for place in (ROOT / room, *inner) for file in place.glob("*.py"))


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not function bodies, not TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only):
            yield node
            yield from at_import_time(node)


def reaches(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for file in files(room):
        tree = ast.parse(file.read_text())
        for nodes, banned in zip((at_import_time(tree), ast.walk(tree)), ROOMS[room], strict=True):
            for name in imports(nodes):
                assert not any(reaches(name, b) for b in banned), f"{room}/{file.name}: {name}"


def test_only_the_face_and_the_command_line_open_the_doors_to_other_rooms() -> None:
    for file in files("dynscope"):
        for name in imports(ast.walk(ast.parse(file.read_text()))):
            for room, doors in DOORS.items():
                assert not reaches(name, room) or file.stem in doors, f"{file.name}: {name}"
            assert not reaches(name, "torch") or file.stem in TORCH_READERS, f"{file.name}: {name}"


@pytest.mark.parametrize("room", ["dynscope", "reports", "examples", "benchmarks"])
def test_only_hooks_registers_torch_hooks(room: str) -> None:
    for file in files(room):
        if file.name == "peers.py":
            continue  # what other tools do
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in HOOKS, f"{room}/{file.name}:{node.lineno}"
