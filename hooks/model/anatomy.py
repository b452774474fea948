"""How a particular model maps to sites: its depth axis, the role of each module, its residual stream.

`Anatomy.of` decides everything from the modules' structure, classes and names; nothing runs.
The rules it reads are in `dynscope.structure`, where a checkpoint's names are read by the same ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dynscope.hooks.model.modules import module_tree
from dynscope.hooks.model.residual import Residual, trace_block
from dynscope.site import Parameter, Site
from dynscope.structure.depth_axis import find_stacks, given_stacks, matching
from dynscope.structure.layouts import Layout, layout_of
from dynscope.structure.node import Node, join
from dynscope.structure.outline import outline
from dynscope.structure.roles import SUBLAYERS, assign_roles, parameter_role

# The roles that are layers of a model without blocks.
_LAYERS = ("conv", *SUBLAYERS)


@dataclass(frozen=True)
class Anatomy:
    """What was decided about a model. All paths and names are without wrappers' prefixes.

    ``sites`` are the modules that are called, in order of definition; ``modules`` holds these and
    the lists around them by path. ``parameters`` lists every parameter once, ``tensors`` holds the
    tensor of each by name, ``tied`` the other names it has and ``layouts`` how it divides, where it
    holds several matrices.

    ``residual`` maps a sublayer's path to that of the module whose *input* is the residual stream
    the sublayer is added to, ``branch`` to that of the module whose *output* is what is added.
    Where this cannot be told from definitions a sublayer is absent from ``residual``.

    ``by_call_order`` is true for a model without repeated blocks, a plain MLP or CNN: its depth
    axis is the order in which its layers run, see `ordered`.
    """

    sites: tuple[Site, ...]
    parameters: tuple[Parameter, ...]
    modules: dict[str, nn.Module] = field(repr=False)
    tensors: dict[str, nn.Parameter] = field(repr=False)
    tied: dict[str, tuple[str, ...]]
    layouts: dict[str, Layout]
    residual: dict[str, str]
    branch: dict[str, str]
    by_call_order: bool

    @classmethod
    def of(cls, model: nn.Module, blocks: str | Sequence[str] | None = None) -> "Anatomy":
        """The anatomy of ``model``, with ``blocks`` as its depth axis if they are given.

        ``blocks`` is a pattern, or a list of paths and patterns, of the modules that repeat (or of
        the list that holds them). A pattern is a glob whose ``*`` stands for one part of a path
        (``encoder.layers.*``) or a regular expression. Each pattern makes one stack.

        Raises `InputError` if ``blocks`` matches no module.
        """
        root = module_tree(model)
        stacks = find_stacks(root) if blocks is None else given_stacks(root, blocks)
        assign_roles(root, stacks)
        residual = Residual()
        for stack in stacks:
            for block in stack:
                trace_block(block, residual)
        named = [node for node in root.walk() if _is_site(node)]
        parameters = _Parameters()
        for node in root.walk():
            parameters.add(node)
        return cls(
            sites=tuple(
                Site(n.path, n.role, n.stack, n.depth, n.type, aliases=tuple(n.aliases))
                for n in named
            ),
            parameters=tuple(parameters.found.values()),
            modules={node.path: node.module for node in root.walk()},
            tensors=parameters.tensors,
            tied=parameters.tied,
            layouts=parameters.layouts,
            residual=residual.residual,
            branch=residual.branch,
            by_call_order=not stacks,
        )

    def select(self, sites: str | Iterable[str]) -> tuple[Site, ...]:
        """The sites of a name or pattern, in order of definition.

        ``"blocks"``: embedding, blocks and their sublayers, never the head (of a model without
        blocks its layers). ``"leaves"``: the modules that compute by themselves. Otherwise
        patterns or paths as in `of`, of which each must match. Raises `InputError` otherwise.
        """
        if sites == "leaves":
            return self._leaves()
        if sites == "blocks":
            return self._blocks() or self._leaves()
        wanted = [sites] if isinstance(sites, str) else list(sites)
        paths = [site.path for site in self.sites]
        found = {path for pattern in wanted for path in matching(pattern, paths, what="site")}
        return tuple(site for site in self.sites if site.path in found)

    def _leaves(self) -> tuple[Site, ...]:
        computing = {name.rpartition(".")[0] for name in self.tensors}
        parents = {site.path.rpartition(".")[0] for site in self.sites if site.path}
        return tuple(s for s in self.sites if s.path in computing or s.path not in parents)

    def _blocks(self) -> tuple[Site, ...]:
        roles = _LAYERS if self.by_call_order else ("block", *SUBLAYERS)
        embeds = tuple(f"{s.path}." for s in self.sites if s.role == "embed")
        return tuple(
            site
            for site in self.sites
            if (site.role in roles and (self.by_call_order or site.depth >= 0))
            or (site.role == "embed" and site.depth < 0 and not site.path.startswith(embeds))
        )

    def ordered(self, paths: Sequence[str]) -> "Anatomy":
        """The same anatomy with depths from the order in which sites were called.

        Each layer with a weight is one deeper than the one before; norms, activations and the like
        share the depth of the layer they follow. Does nothing where there are blocks.
        """
        if not self.by_call_order:
            return self
        depths: dict[str, int] = {}
        depth = -1
        roles = {site.path: site.role for site in self.sites}
        for path in dict.fromkeys(paths):
            depth += roles.get(path) in (*_LAYERS, "head")
            depths[path] = depth
        return replace(
            self,
            sites=tuple(replace(s, depth=depths.get(s.path, -1)) for s in self.sites),
            parameters=tuple(
                replace(p, depth=depths.get(p.name.rpartition(".")[0], -1)) for p in self.parameters
            ),
        )

    def split(self, name: str) -> tuple[tuple[str, Tensor], ...]:
        """The matrices of a parameter with their roles: q, k and v of a fused weight, for example.

        A parameter that is one matrix, or whose layout is not known, comes back whole.
        """
        if name in self.layouts:
            return self.layouts[name].split(self.tensors[name])
        role = next(parameter.role for parameter in self.parameters if parameter.name == name)
        return ((role, self.tensors[name]),)

    def tree(self) -> str:
        """What was decided, as an indented tree in which equal blocks are told once."""
        blocks = {(site.stack, site.depth) for site in self.sites if site.depth >= 0}
        stacks = len({stack for stack, _ in blocks})
        axis = "depth by the order of calls" if self.by_call_order else f"{len(blocks)} blocks"
        lines = [axis + (f" in {stacks} stacks" if stacks > 1 else "")]
        lines += outline(self.sites, self.residual, self.branch)
        lines += [f"{name} is also {', '.join(others)}" for name, others in self.tied.items()]
        return "\n".join(lines)


def _is_site(node: Node) -> bool:
    """Whether a module is called and is not the whole model; a model of one layer is a site."""
    return not node.container and (node.parent is not None or node.atomic)


@dataclass
class _Parameters:
    """Every parameter once, under its first name."""

    found: dict[int, Parameter] = field(default_factory=dict)
    tensors: dict[str, nn.Parameter] = field(default_factory=dict)
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        for name, tensor in node.parameters:
            path = join(node.path, name)
            first = self.found.get(id(tensor))
            if first is not None:
                self.tied[first.name] = (*self.tied.get(first.name, ()), path)
                continue
            lazy = is_lazy(tensor)
            role = parameter_role(node, name)
            self.found[id(tensor)] = Parameter(
                name=path,
                role=role,
                stack=node.stack,
                depth=node.depth,
                shape=() if lazy else tuple(tensor.shape),
                numel=0 if lazy else tensor.numel(),
                trainable=tensor.requires_grad,
            )
            self.tensors[path] = tensor
            layout = None if lazy else layout_of(node, name, tuple(tensor.shape), role)
            if layout is not None:
                self.layouts[path] = layout
