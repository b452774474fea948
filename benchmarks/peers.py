"""What other tools do in the same training step, each set up as its own documentation says.

Those that are installed take part in `benchmarks.overhead`; they are no dependency of anything:
pip install --target peers --no-deps mup torch-module-monitor torchmortem; pip install --target peers wandb
PYTHONPATH=peers python -m benchmarks.overhead
"""

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn


class Peer:
    """What a tool does around a step; by itself nothing."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def begin(self) -> None: ...
    def after_backward(self, loss: Tensor) -> None: ...
    def end(self, loss: Tensor) -> None: ...
    def close(self) -> None: ...


class HandMade(Peer):
    """Hooks as a user writes them: six statistics of every leaf's output and of its gradient."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.kept: dict[str, list[float]] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.kept[name] = statistics(output.detach())
            if output.requires_grad:
                output.register_hook(lambda g: self.kept.update({f"{name}.grad": statistics(g)}))

        return hook


def statistics(x: Tensor) -> list[float]:
    absolute = x.abs()
    found = (x.mean(), x.var(), absolute.mean(), absolute.max(), x.norm(), (x == 0).float().mean())
    return [float(value) for value in found]


class Mup(Peer):
    """mup's coordinate check: mean magnitude and deviation of every output."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.handles: list[Any] = []

    def begin(self) -> None:
        from mup.coord_check import _record_coords  # type: ignore[import-not-found]

        wanted = {"l1": lambda x: x.abs().mean(), "std": lambda x: x.std()}
        for name, module in self.model.named_modules():
            hook = _record_coords([], 0, name, 1, wanted, {}, {})
            self.handles.append(module.register_forward_hook(hook))

    def end(self, loss: Tensor) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class ModuleMonitor(Peer):
    """torch-module-monitor: means and norms of activations, gradients and parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch_module_monitor import (  # type: ignore[import-not-found]
            ModuleMonitor as Monitor,
        )

        super().__init__(model, optimizer)
        self.monitor, self.step = Monitor(monitor_step_fn=lambda step: True), 0
        self.monitor.set_module(model)
        self.monitor.add_activation_metric("mean", lambda x: x.mean())
        self.monitor.add_activation_metric("norm", lambda x: x.norm())
        self.monitor.add_parameter_metric("norm", lambda x: x.norm())
        self.monitor.add_gradient_metric("norm", lambda x: x.norm())

    def begin(self) -> None:
        self.monitor.begin_step(self.step)

    def after_backward(self, loss: Tensor) -> None:
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()

    def end(self, loss: Tensor) -> None:
        self.monitor.end_step()
        self.monitor.get_step_metrics()
        self.step += 1


class Torchmortem(Peer):
    """torchmortem with its defaults."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torchmortem import Autopsy  # type: ignore[import-not-found]

        super().__init__(model, optimizer)
        self.autopsy = Autopsy(model, optimizer)
        self.autopsy.attach()

    def end(self, loss: Tensor) -> None:
        self.autopsy.step(loss=float(loss.detach()))

    def close(self) -> None:
        self.autopsy.detach()  # else it writes a crash report at exit


class Wandb(Peer):
    """wandb.watch, offline: histograms of weights and gradients."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import wandb  # type: ignore[import-not-found]

        super().__init__(model, optimizer)
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        self.run = wandb.init(project="overhead", dir=tempfile.mkdtemp())
        self.run.watch(model, log="all", log_freq=1)

    def end(self, loss: Tensor) -> None:
        self.run.log({"loss": float(loss.detach())})

    def close(self) -> None:
        self.run.finish()


PEERS: dict[str, tuple[str, type[Peer]]] = {
    "hand-made hooks, six statistics, forward and backward": ("torch", HandMade),
    "mup, coordinate check": ("mup", Mup),
    "torch-module-monitor": ("torch_module_monitor", ModuleMonitor),
    "torchmortem": ("torchmortem", Torchmortem),
    "wandb.watch, offline": ("wandb", Wandb),
}


def installed() -> dict[str, type[Peer]]:
    return {name: peer for name, (module, peer) in PEERS.items() if find_spec(module)}
