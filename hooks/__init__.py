"""Everything that touches a live `nn.Module`: recorder, anatomy, schedules, weights."""
