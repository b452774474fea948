"""What a training step does to the parameters: gradients, clipping, updates, weights, settings.

Everything about optimizers and gradient scalers is here, with the schedule and the cost of steps.
A wrapper of optimizers is added in `wrapped`.
"""
