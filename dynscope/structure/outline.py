"""An anatomy as an indented tree, with equal blocks told once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

from dynscope.site import Site


@dataclass
class _Twig:
    site: Site | None = None
    note: str = ""
    twigs: "dict[str, _Twig]" = field(default_factory=dict)

    def shape(self) -> tuple[object, ...]:
        """Equal for twigs that differ in depth only."""
        site = (self.site.role, self.site.stack, self.site.type) if self.site else None
        return (site, self.note, tuple((name, twig.shape()) for name, twig in self.twigs.items()))


def outline(
    sites: Sequence[Site],
    residual: Mapping[str, str] = MappingProxyType({}),
    branch: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """One line per site: its name (``blocks.0-11`` for equal ones), role, class and residual."""
    root = _Twig()
    block = ""
    for site in sites:
        block = site.path if site.role == "block" else block
        twig = root
        for name in site.path.split(".") if site.path else ():
            twig = twig.twigs.setdefault(name, _Twig())
        twig.site, twig.note = site, _note(site.path, block, residual, branch)
    rows = list(_rows(root, "", 0))
    width = max((len(name) for name, _, _ in rows), default=0)
    roles = max((len(role) for _, role, _ in rows), default=0)
    return [f"{name:{width}}  {role:{roles}}  {rest}".rstrip() for name, role, rest in rows]


def _rows(twig: _Twig, prefix: str, indent: int) -> "list[tuple[str, str, str]]":
    rows = []
    for run in _runs(twig):
        (first, inner), last = run[0], run[-1][0]
        name = prefix + (first if len(run) == 1 else f"{first}-{last}")
        if inner.site is None:
            rows += _rows(inner, f"{name}.", indent)
            continue
        site = inner.site
        role = site.role + (f" (stack {site.stack})" if site.role == "block" and site.stack else "")
        rows.append(("  " * indent + name, role, f"{site.type}{inner.note}"))
        rows += _rows(inner, "", indent + 1)
    return rows


def _runs(twig: _Twig) -> list[list[tuple[str, _Twig]]]:
    """Neighbours that are equal and numbered, together; everything else alone."""

    def key(item: tuple[str, _Twig]) -> object:
        name, inner = item
        return inner.shape() if name.isdigit() and inner.twigs else name

    return [list(run) for _, run in groupby(twig.twigs.items(), key)]


def _note(sublayer: str, block: str, residual: Mapping[str, str], branch: Mapping[str, str]) -> str:
    """How a sublayer hangs on the residual stream, in names relative to its block."""
    if sublayer not in branch:
        return ""
    names = {sublayer: "its own", block: "the block's"}
    source, adds = residual.get(sublayer), branch[sublayer]
    through = "" if adds == sublayer else f", through {adds.removeprefix(block + '.')}"
    if source is None:
        return f"{through}, residual unknown"
    name = names.get(source) or source.removeprefix(block + ".") + "'s"
    return f"{through}, added to {name} input"
