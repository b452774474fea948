"""Settings of all tests."""

import os

from hypothesis import settings

# Small tensors gain nothing from threads, and on a busy machine each one waits for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine makes per-example deadlines fail at random; the same examples every time make a
# failure on one machine a failure on all.
settings.register_profile("dynscope", deadline=None, derandomize=True)
settings.load_profile("dynscope")
