"""One tensor in, numbers out: which tensors can be read, what is summed of one, and the tally.

Nothing in here knows a module or a step. A sum that a new metric needs is added in `reduce`, its
fused twin in ``fused.c``, its place in `tally`; what follows from it in `dynscope.analysis.sums`.
"""
