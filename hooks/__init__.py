"""Everything that touches a live `nn.Module`: recorder, anatomy, schedules, weights."""

from dynscope.hooks.anatomy import Anatomy
from dynscope.hooks.attachment import attach
from dynscope.hooks.custom import SiteMetric
from dynscope.hooks.recorder import Recorder
from dynscope.hooks.schedule import every, log_spaced

__all__ = ["Anatomy", "Recorder", "SiteMetric", "attach", "every", "log_spaced"]
