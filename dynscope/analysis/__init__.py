"""What recorded numbers mean: metrics from sums, shapes over depth, weights by role and verdicts.

Plain arithmetic on arrays and runs: no file is written and nothing is drawn here.
"""
