"""Fused weights beside their parts, so that q, k and v, gate and up, or each expert is fitted too."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dynscope.hooks.layouts import Layout
from dynscope.hooks.weights import is_readable
from dynscope.site import Parameter


def parts_of(
    parameters: Sequence[Parameter], layouts: Mapping[str, Layout]
) -> tuple[Parameter, ...]:
    """The parts of every matrix of known layout, in the order of `with_parts`.

    A part is called ``name[label]``, by its role and, of experts in one tensor, its expert's
    number. Biases are not divided.
    """
    return tuple(
        replace(
            whole,
            name=f"{whole.name}[{label}]",
            role=role,
            shape=tuple(part.shape),
            numel=part.numel(),
            part_of=whole.name,
        )
        for whole in parameters
        if whole.name in layouts
        for label, role, part in layouts[whole.name].matrices(_shaped(whole))
        if part.ndim >= 2
    )


def with_parts(
    parameters: Sequence[Parameter],
    tensors: Sequence[Tensor | None],
    layouts: Mapping[str, Layout],
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, then every part, cut out only when it is asked for.

    A tensor that is gone, or of another shape than it was described with, gives empty ones. One
    that cannot be read (sharded, quantised) is never cut: it stands for each of its parts.
    """
    present = [torch.empty(0) if tensor is None else tensor for tensor in tensors]
    yield from zip((parameter.name for parameter in parameters), present, strict=True)
    for whole, tensor in zip(parameters, present, strict=True):
        if whole.name not in layouts:
            continue
        if tuple(tensor.shape) != whole.shape:
            tensor = torch.empty(whole.shape, device="meta")
        described = layouts[whole.name].matrices(_shaped(whole))
        labels = [label for label, _, part in described if part.ndim >= 2]
        if not is_readable(tensor):
            yield from ((f"{whole.name}[{label}]", tensor) for label in labels)
        elif labels:
            for label, _, part in layouts[whole.name].matrices(tensor.detach()):
                yield f"{whole.name}[{label}]", part


def _shaped(parameter: Parameter) -> Tensor:
    return torch.empty(parameter.shape, device="meta")
