"""Checkpoints on disk or behind a URL, read tensor by tensor and without running their code.

How to use it from the command line, and what can be read: docs/checkpoints.md.
"""

from dynscope.checkpoints.checkpoint import Checkpoint, Tensor
from dynscope.checkpoints.series import series

__all__ = ["Checkpoint", "Tensor", "series"]
