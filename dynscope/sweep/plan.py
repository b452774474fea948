"""What a sweep is going to do: which tensors of which checkpoints, and as which parameters."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from dynscope.analysis.by_role import matrices
from dynscope.checkpoints import Checkpoint
from dynscope.errors import InputError
from dynscope.runfile.schema import to_json
from dynscope.site import POOLED, ROLES, Parameter
from dynscope.structure.names import Structure
from dynscope.sweep.weigh import METRICS, Task, Wanted

TASK_BYTES = 64 * 1024 * 1024  # tensors read for one task; a larger tensor is a task of its own


@dataclass(frozen=True)
class Choice:
    """How to fit, and which parameters: of these roles, of names that match; all where empty."""

    method: str = "exact"
    trim: str = "mid_80"
    roles: tuple[str, ...] = ()
    match: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for role in self.roles:
            if role not in ROLES:
                raise InputError(f"no role {role!r}; there are: {', '.join(ROLES)}", exit_code=2)

    def takes(self, one: Parameter) -> bool:
        return (not self.roles or one.role in self.roles) and (
            not self.match or any(fnmatchcase(one.name, pattern) for pattern in self.match)
        )


@dataclass(frozen=True)
class Plan:
    """The checkpoints of a series in their order, and for each the parameters it will be read as."""

    checkpoints: tuple[Checkpoint, ...]
    structures: tuple[Structure, ...]
    choice: Choice

    @classmethod
    def of(cls, checkpoints: Sequence[Checkpoint], choice: Choice) -> "Plan":
        """Raises `InputError` when nothing fits the choice."""
        structures: list[Structure] = []
        for i, one in enumerate(checkpoints):
            before = checkpoints[i - 1]
            if i and one.tensors == before.tensors and one.config == before.config:
                structures.append(structures[-1])
            else:
                shapes = {tensor.name: tensor.shape for tensor in one.tensors}
                structures.append(Structure.of(shapes, one.config))
        plan = cls(tuple(checkpoints), tuple(structures), choice)
        if not plan.parameters:
            asked = ", ".join((*choice.roles, *choice.match))
            lacking = f"no tensor fits {asked!r}" if asked else "there are no tensors in it"
            raise InputError(f"{checkpoints[0].path}: {lacking}")
        return plan

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The step of each checkpoint; their places in the series where not all name one."""
        named = [one.step for one in self.checkpoints if one.step is not None]
        if len(set(named)) == len(self.checkpoints):
            return tuple(named)
        return tuple(range(len(self.checkpoints)))

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter of any checkpoint that is wanted, once, then their pools."""
        found: dict[str, Parameter] = {}
        for structure in {id(one): one for one in self.structures}.values():
            found |= {p.name: p for p in structure.parameters if p.name not in found}
        wanted = tuple(filter(self.choice.takes, found.values()))
        return (*wanted, *(_pool(key, members) for key, members in matrices(wanted).items()))

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The work in pieces of some megabytes, the same pieces whoever does them."""
        tasks: list[Task] = []
        for index, wanted in enumerate(self._wanted()):
            one = self.checkpoints[index]
            sizes = {tensor.name: tensor.nbytes for tensor in one.tensors}
            for piece in _pieces(wanted, sizes):
                how = (self.choice.method, self.choice.trim)
                source = one.only({each.stored for each in piece})
                tasks.append(Task(len(tasks), index, source, piece, *how))
        return tuple(tasks)

    def nbytes(self, task: Task) -> int:
        """Bytes that a task reads."""
        sizes = {tensor.name: tensor.nbytes for tensor in task.source.tensors}
        return sum(sizes[one.stored] for one in task.wanted)

    @cached_property
    def text(self) -> str:
        """All that the result depends on, to know the journal of the same sweep again."""
        files = [
            [str(one.path), one.step, _changed(str(one.path)), [*map(repr, one.tensors)]]
            for one in self.checkpoints
        ]
        return to_json([METRICS, vars(self.choice), files])

    def _wanted(self) -> Iterator[tuple[Wanted, ...]]:
        pooled = {
            one.name: _pool_name(key)
            for key, members in matrices(self.parameters).items()
            for one in members
        }
        known: dict[int, tuple[Wanted, ...]] = {}
        for structure in self.structures:
            if id(structure) not in known:
                known[id(structure)] = tuple(self._of(structure, pooled))
            yield known[id(structure)]

    def _of(self, structure: Structure, pooled: Mapping[str, str]) -> Iterator[Wanted]:
        together: dict[str, list[str]] = {}
        for one in filter(self.choice.takes, structure.parameters):
            together.setdefault(one.part_of or one.name, []).append(one.name)
        for whole, names in together.items():
            parts = frozenset(names) - {whole}
            yield Wanted(
                stored=structure.stored[whole],
                name=whole,
                whole=whole in names,
                layout=structure.layouts[whole] if parts else None,
                parts=parts,
                pools={name: pooled[name] for name in names if name in pooled},
            )


def _pieces(wanted: Sequence[Wanted], sizes: Mapping[str, int]) -> Iterator[tuple[Wanted, ...]]:
    piece: list[Wanted] = []
    total = 0
    for one in wanted:
        if piece and total + sizes[one.stored] > TASK_BYTES:
            yield tuple(piece)
            piece, total = [], 0
        piece.append(one)
        total += sizes[one.stored]
    if piece:
        yield tuple(piece)


def _pool_name(key: tuple[str, int]) -> str:
    role, stack = key
    return f"[all {role}, stack {stack}]" if stack else f"[all {role}]"


def _pool(key: tuple[str, int], members: Sequence[Parameter]) -> Parameter:
    numel = sum(one.numel for one in members)
    return replace(
        members[0], name=_pool_name(key), depth=-1, shape=(len(members),), numel=numel, part_of=POOLED
    )  # fmt: skip


def _changed(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of a local file and its configuration, or of all in a folder."""
    place = Path(path)
    every = sorted(place.glob("*")) if place.is_dir() else [place, place.with_name("config.json")]
    own = re.compile(r"\.h5$|\.partial|\.part$")  # what a sweep itself writes
    told = [(one.name, os.stat(one)) for one in every if one.exists() and not own.search(one.name)]
    return [(name, found.st_size, found.st_mtime_ns) for name, found in told]
