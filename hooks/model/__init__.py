"""Reading an architecture, without running it: depth axis, roles, residual stream, fused layouts.

The rules that a checkpoint's names are read by too stand in `dynscope.structure`; what only a
live module tells stands here. A model family is added in `families`.
"""
