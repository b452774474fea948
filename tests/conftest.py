"""Settings of all tests."""

from hypothesis import settings

# A shared machine makes per-example deadlines fail at random; the same examples every time make a
# failure on one machine a failure on all.
settings.register_profile("dynscope", deadline=None, derandomize=True)
settings.load_profile("dynscope")
