"""Everything that touches a live `nn.Module`: recorder, anatomy, schedules, weights."""

from dynscope.hooks.attachment import attach
from dynscope.hooks.model.anatomy import Anatomy
from dynscope.hooks.recorder import Recorder
from dynscope.hooks.tensor.custom import SiteMetric
from dynscope.hooks.training.schedule import every, log_spaced

__all__ = ["Anatomy", "Recorder", "SiteMetric", "attach", "every", "log_spaced"]
