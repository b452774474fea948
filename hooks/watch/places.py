"""From an anatomy and a choice of sites to the tally's rows and the hooks that fill them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.telling.telling import Telling, named
from dynscope.hooks.tensor.private import ScriptModule
from dynscope.hooks.watch.forward import InputHook, RootHook, SiteHook, VersionHook
from dynscope.hooks.watch.observation import Observer
from dynscope.hooks.watch.rows import Row, Stream
from dynscope.site import Site

_CONVOLUTIONS = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
)


@dataclass(frozen=True)
class Places:
    """``rows`` of the tally; the first ``len(sites)`` are the sites, in order of definition.

    ``branch`` and ``residual`` name for each row the rows whose sizes its branch_ratio compares,
    or -1; ``inputs`` are the rows whose module's input is taken.
    """

    sites: tuple[Site, ...]
    rows: list[Row]
    branch: list[int]
    residual: list[int]
    inputs: frozenset[int]

    @classmethod
    def of(
        cls,
        anatomy: Anatomy,
        sites: Sequence[Site],
        *,
        light: bool,
        streams: tuple[int, int] | None = None,
    ) -> "Places":
        """A row per site, and one for each other place that a branch_ratio needs.

        ``streams``: how many residual streams a block's output holds, and along which axis.
        """
        layout = _Layout(anatomy)
        divided = [(s, *each) for s in sites for each in _streams(s, streams)]
        sites = [site for _, site, _ in divided]
        rows = [
            Row(
                site.path,
                layout.of(whole.path),
                paired=site.role == "block" and not light,
                stream=stream,
            )
            for whole, site, stream in divided
        ]
        index = {row.path: i for i, row in enumerate(rows)}
        branch, residual = [-1] * len(rows), [-1] * len(rows)
        inputs: set[int] = set()

        def place(path: str, kind: str) -> int:
            if path not in index:
                index[path] = len(rows)
                rows.append(Row(path, kind="size" if kind == "size" else "input"))
            return index[path]

        for i, site in enumerate(sites):
            if light or site.path not in anatomy.residual:
                continue
            branch[i] = place(anatomy.branch.get(site.path, site.path), "size")
            stream = place(anatomy.residual[site.path], "input")
            if not rows[stream].paired:
                inputs.add(stream)
            residual[i] = stream
        unused = [-1] * (len(rows) - len(sites))
        return cls(tuple(sites), rows, branch + unused, residual + unused, frozenset(inputs))

    def hook(self, anatomy: Anatomy, observer: Observer, telling: Telling) -> list[RemovableHandle]:
        """Register every hook; a module that takes none (TorchScript) is told."""
        handles: list[RemovableHandle] = []
        for i, row in enumerate(self.rows):
            module = anatomy.modules.get(row.module)
            if module is None:
                continue  # removed since
            try:
                handles.extend(_register(module, observer, i, row, i in self.inputs))
            except Exception as error:
                telling.failed(row.path, f"takes no hook ({named(error)})")
        return handles


def _streams(site: Site, streams: tuple[int, int] | None) -> Iterator[tuple[Site, Stream | None]]:
    """A site for each stream in the output of a block; its stack tells it from the others."""
    if streams is None or site.role != "block":
        yield site, None
        return
    count, axis = streams
    for i in range(count):
        stack = site.stack * count + i
        yield replace(site, path=f"{site.path}[{i}]", stack=stack), Stream(i, count, axis)


def _register(
    module: nn.Module, observer: Observer, index: int, row: Row, takes_input: bool
) -> Iterator[RemovableHandle]:
    if isinstance(module, ScriptModule):
        raise TypeError("TorchScript modules cannot be hooked")
    if takes_input:
        yield module.register_forward_pre_hook(InputHook(observer, index), with_kwargs=True)
    if row.kind == "input":
        return
    hook = SiteHook(observer, index)
    if row.paired:
        yield module.register_forward_pre_hook(VersionHook(hook), with_kwargs=True)
    yield module.register_forward_hook(hook, with_kwargs=row.paired)


def hook_root(
    model: nn.Module,
    root: nn.Module,
    observer: Observer,
    on_enter: Callable[[bool, nn.Module, Any, Any], None],
) -> list[RemovableHandle]:
    """Watch the model being entered and left, with ``root`` what its wrappers hold.

    Also the parts of it that are called by themselves: ``model.encode(x)`` and Lightning's
    ``training_step`` call children of a module that is not called.
    """
    handles: list[RemovableHandle] = []
    for module in dict.fromkeys((model, *model.children(), root, *root.children())):
        if isinstance(module, ScriptModule):
            continue
        enter, leave = (
            RootHook(observer, on_enter, module=module, entering=entering, is_model=module is model)
            for entering in (True, False)
        )
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


class _Layout:
    """Which axes of a site's output hold channels, tokens and batch."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._modules = anatomy.modules
        self._tokens_first = any(
            getattr(module, "batch_first", True) is False for module in anatomy.modules.values()
        )

    def of(self, path: str) -> str:
        """ "bct" beside and inside convolutions, "tbc" where a module says batch_first=False."""
        module, parent = self._modules[path], self._modules.get(path.rpartition(".")[0])
        family = (module, *module.children(), *(parent.children() if parent and path else ()))
        if any(isinstance(member, _CONVOLUTIONS) for member in family):
            return "bct"
        return "tbc" if self._tokens_first else "btc"
