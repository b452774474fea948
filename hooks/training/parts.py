"""Fused weights beside their parts, so that q, k and v, gate and up, or each expert is fitted too."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dynscope.hooks.training.weights import is_readable
from dynscope.site import Parameter
from dynscope.structure.layouts import Layout


def with_parts(
    parameters: Sequence[Parameter],
    tensors: Sequence[Tensor | None],
    layouts: Mapping[str, Layout],
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, then every part (as `parts_of`), cut out only when it is asked for.

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
        described = layouts[whole.name].described(whole.shape)
        labels = [label for label, _, shape in described if len(shape) >= 2]
        if not is_readable(tensor):
            yield from ((f"{whole.name}[{label}]", tensor) for label in labels)
        elif labels:
            for label, _, part in layouts[whole.name].matrices(tensor.detach()):
                yield f"{whole.name}[{label}]", part
