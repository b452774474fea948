"""DeepScaleLM's moment rules (Kedia et al., arXiv 2403.09635): what a layer does to mean, variance and
the correlation of two tokens, forward and backward, at initialization."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Moments:
    """Of one channel: mean and variance over tokens, covariance of two tokens; and of gradients the
    variance and covariance, which flow the other way."""

    mean: float = 0.0
    variance: float = 1.0
    covariance: float = 0.0

    @property
    def correlation(self) -> float:
        return self.covariance / self.variance


def linear(x: Moments, inputs: int, weight_variance: float) -> Moments:
    """A matrix of independent weights, no bias."""
    each = inputs * weight_variance
    return Moments(0.0, each * (x.variance + x.mean**2), each * (x.mean**2 + x.covariance))


def linear_gradient(g: Moments, outputs: int, weight_variance: float) -> Moments:
    each = outputs * weight_variance
    return Moments(0.0, each * g.variance, each * g.covariance)


def relu(x: Moments) -> Moments:
    """Of a Gaussian of mean 0."""
    s, r = x.variance, x.correlation
    joint = math.pi * r + math.sqrt(1 - r * r) - r * math.acos(r) - 1
    return Moments(
        math.sqrt(s / (2 * math.pi)),
        s * (math.pi - 1) / (2 * math.pi),
        s * joint / (2 * math.pi),
    )


def relu_gradient(g: Moments, x: Moments) -> Moments:
    both = 0.25 + math.asin(x.correlation) / (2 * math.pi)
    return replace(g, variance=g.variance / 2, covariance=both * g.covariance)


def gelu(x: Moments) -> Moments:
    """Of a Gaussian of mean 0, the exact (erf) form; the covariance of tokens is not given."""
    s = x.variance
    a = s / (1 + s)
    spread = math.pi / 2 - a + math.asin(a) + 2 * s / ((1 + s) * math.sqrt(1 + 2 * s))
    return Moments(s / math.sqrt(2 * math.pi * (1 + s)), s / (2 * math.pi) * spread, math.nan)


def layer_norm(x: Moments, width: int) -> Moments:
    return Moments(0.0, 1.0, x.correlation * (1 - 1 / width))


def layer_norm_gradient(g: Moments, x: Moments) -> Moments:
    return replace(g, variance=g.variance / x.variance, covariance=g.covariance / x.variance)


def dropout(x: Moments, p: float) -> Moments:
    return replace(x, variance=(x.variance + p * x.mean**2) / (1 - p))


def dropout_gradient(g: Moments, p: float) -> Moments:
    return replace(g, variance=g.variance / (1 - p))
