"""Observing passes: the hooks on modules and outputs, what they observe, and what was missed.

`forward` holds what torch calls, `observation` what is done then, `places` which modules get one.
The only room that registers hooks on modules. Padding masks and the end of a backward are here.
"""
