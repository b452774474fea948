"""The rooms import each other one way, as CONTRIBUTING.md draws them, and no file is in a circle."""

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {"dynscope": "dynscope", "dynscope.hooks": "hooks", "dynscope.reports": "reports"}

# From the ground up: each room, and the rooms below it that its files may import.
BASE = "errors site catalogue"
ROOMS = {
    "base": "",
    "weibull": "base",
    "structure": "base",
    "runfile": "base",
    "checkpoints": "base",
    "reading": "base runfile",
    "analysis": "base weibull reading",
    "writing": "base runfile reading",
    "sweep": "base weibull structure runfile checkpoints reading analysis writing",
    "hooks.telling": "writing",
    "hooks.tensor": "base analysis hooks.telling",
    "hooks.model": "base structure",
    "hooks.watch": "base analysis hooks.telling hooks.tensor hooks.model",
    "hooks.training": "base weibull structure analysis hooks.telling hooks.tensor hooks.model",
    "hooks.recording": "base structure writing hooks.telling hooks.tensor hooks.model hooks.watch "
    "hooks.training",
    "hooks": "base weibull runfile writing hooks.telling hooks.tensor hooks.model hooks.watch "
    "hooks.training hooks.recording",
    "reports.elements": "base",
    "reports.numbers": "base reading analysis reports.elements",
    "reports.drawing": "base analysis reports.elements reports.numbers",
    "reports.wording": "base weibull reading analysis reports.elements reports.numbers",
    "reports.cards": "base analysis reports.elements reports.numbers reports.drawing "
    "reports.wording",
    "reports": "base reading analysis reports.elements reports.numbers reports.drawing "
    "reports.wording reports.cards",
    "cli": "base structure reading analysis sweep reports.elements reports dynscope",
    "dynscope": "base reading hooks cli",
}
# What no room may import, but these.
LIBRARIES = {
    "torch": ("hooks", "checkpoints.torch_file", "checkpoints.distributed"),
    "plotly": ("reports",),
    "h5py": ("runfile", "reading", "writing"),
}
HEAVY = ("torch", "plotly")  # not even where they may be imported, when dynscope is
HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_hook")
MOST_LINES = 340


def _modules() -> dict[str, Path]:
    """Every module of the three places by its name; the links between them are not followed."""
    found = {}
    for package, folder in PLACES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):  # which follows no links
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = _modules()


def room_of(module: str) -> str:
    """The room of a module; of a package, the room that it is."""
    is_room = MODULES[module].name == "__init__.py"
    room = (module if is_room else module.rpartition(".")[0]).removeprefix("dynscope.")
    return "base" if room == "dynscope" and module.rpartition(".")[2] in BASE.split() else room


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What is imported: modules of ours by their own name, others as written."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not function bodies, not TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only):
            yield node
            yield from at_import_time(node)


TREES = {module: ast.parse(file.read_text()) for module, file in MODULES.items()}


def test_the_table_itself_goes_one_way() -> None:
    above: set[str] = set()
    for room, below in ROOMS.items():
        # The face and the command line meet each other: it imports main, which asks its version.
        assert set(below.split()) <= above | ({"dynscope"} if room == "cli" else set()), room
        above.add(room)


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_only_the_rooms_below_its_own(module: str) -> None:
    room = room_of(module)
    for name in imports(ast.walk(TREES[module])):
        if name in MODULES and room_of(name) != room:
            assert room_of(name) in ROOMS[room].split(), f"{module} ({room}) imports {name}"


def test_no_file_is_in_a_circle_not_even_through_a_function() -> None:
    lazily = {"dynscope", "dynscope.__main__"}  # the face opens doors when it is asked to
    graph = {
        module: {name for name in imports(ast.walk(tree)) if name in MODULES and name != module}
        for module, tree in TREES.items()
        if module not in lazily
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


@pytest.mark.parametrize("module", MODULES)
def test_libraries_are_used_only_where_they_belong(module: str) -> None:
    own = module.removeprefix("dynscope.")
    for name in imports(ast.walk(TREES[module])):
        for library, users in LIBRARIES.items():
            allowed = any(own == user or own.startswith(f"{user}.") for user in users)
            assert allowed or name.split(".")[0] != library, f"{module} imports {name}"
    if not own.startswith("hooks"):
        for name in imports(at_import_time(TREES[module])):
            assert name.split(".")[0] not in HEAVY, f"{module} imports {name} at once"


@pytest.mark.parametrize("folder", ["dynscope", "reports", "examples", "benchmarks"])
def test_only_hooks_registers_torch_hooks(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        if file.name == "peers.py":
            continue  # what other tools do
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in HOOKS, f"{file}:{node.lineno}"


def test_a_file_is_short_or_says_in_its_first_line_why_not() -> None:
    for folder in PLACES.values():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".c", ".js"):
                lines = file.read_text().splitlines()
                assert len(lines) <= MOST_LINES or "In one file" in lines[0], file


@pytest.mark.parametrize("module", [m for m, f in MODULES.items() if f.name == "__init__.py"])
def test_a_room_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(TREES[module])


def test_the_guide_draws_the_house_as_it_is() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = re.findall(r"^\| `(\S+)` \|[^|]*\| ([^|]*) \|", guide, re.MULTILINE)
    assert dict(drawn) == {
        room: ", ".join(f"`{below}`" for below in rooms.split()) or "none"
        for room, rooms in ROOMS.items()
    }


def test_the_files_that_the_guide_names_are_there() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    for path, name in re.findall(r"`((?:dynscope|hooks|reports|tests)/\S+?)(?:: (\S+?))?`", guide):
        assert (ROOT / path).exists(), path
        if name:
            assert re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / path).read_text()), name
