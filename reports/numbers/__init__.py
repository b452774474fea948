"""What a page draws, as plain arrays: curves over depth, lines over steps, pairs of runs.

Runs come in, summaries go out; no figure is made here.
"""
