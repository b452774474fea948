"""Why a parameter has no Weibull fit, and what limits one that it has."""

FINE = ""
NOT_A_MATRIX = "a bias or a gain, not a matrix"
QUANTISED = "stored as integers, quantised or complex"
WRAPPED = "sharded or held by a tensor subclass"
SPARSE = "sparse or packed layout"
NO_VALUES = "no values yet (meta device or lazy)"
TOO_FEW = "fewer than 100 finite non-zero values"
LEFT_OUT = "more than 90 % of the values are zero or not finite"
CONSTANT = "all magnitudes are equal, or nearly"
FEW_POINTS = "fewer than 5 distinct magnitudes in the fitted range"

REASONS = (
    FINE, NOT_A_MATRIX, QUANTISED, WRAPPED, SPARSE,
    NO_VALUES, TOO_FEW, LEFT_OUT, CONSTANT, FEW_POINTS,
)  # fmt: skip
"""Why there is no fit; ``weight/weibull_reason`` is an index into this tuple, 0 for a good fit."""

FEW_LEVELS = "few distinct levels"
