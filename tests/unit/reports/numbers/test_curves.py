"""Which sites and parameters make one curve over depth."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynscope.reports.numbers.curves import MOST_ALIKE, parameter_curves, site_curves
from dynscope.site import ROLES, Parameter, Site
from tests.factories import make_parameters, make_sites


def test_stream_and_sublayers_are_curves_and_the_rest_stands_beside() -> None:
    curves = site_curves(make_sites(3))
    assert [curve.label for curve in curves] == [
        "residual stream", "attention", "FFN", "embedding", "after the blocks",
    ]  # fmt: skip
    assert [curve.joined for curve in curves] == [True, True, True, False, False]
    assert curves[0].names == ("blocks.0", "blocks.1", "blocks.2")
    assert curves[3].depths.tolist() == [-1]
    assert curves[4].depths.tolist() == [3]


def test_vectors_are_minor_and_told_apart_by_their_names() -> None:
    curves = parameter_curves(make_parameters(2))
    minor = [curve.label for curve in curves if curve.minor]
    assert minor == ["norm1.weight", "norm2.weight"]


def test_experts_of_one_block_are_curves_of_their_own() -> None:
    names = [f"h.{block}.experts.{expert}.up" for block in range(2) for expert in range(3)]
    curves = parameter_curves([Parameter(name, "up", 0, int(name[2]), (2, 2), 4) for name in names])
    assert [curve.names for curve in curves] == [
        (f"h.0.experts.{expert}.up", f"h.1.experts.{expert}.up") for expert in range(3)
    ]


def test_encoder_and_decoder_are_told_apart() -> None:
    sites = [
        Site(f"{part}.{i}", "block", stack, i) for stack, part in enumerate("ed") for i in (0, 1)
    ]
    assert [curve.label for curve in site_curves(sites)] == [
        "residual stream", "stack 1 residual stream",
    ]  # fmt: skip


def test_without_blocks_the_layers_are_one_curve_in_call_order() -> None:
    sites = [Site("0", "other", 0, 0), Site("1", "activation", 0, 1), Site("2", "other", 0, 2)]
    (curve,) = site_curves(sites)
    assert (curve.label, curve.noun) == ("layers in call order", "layer")
    assert curve.depths.tolist() == [0, 1, 2]


def test_without_blocks_parameters_are_one_curve_for_each_role_and_kind() -> None:
    layers = [("c1", "conv", 0), ("c2", "conv", 1), ("f1", "other", 2), ("unused", "other", -1)]
    parameters = [
        Parameter(f"{name}.{kind}", role, 0, depth, shape)
        for name, role, depth in layers
        for kind, shape in (("weight", (2, 2)), ("bias", (2,)))
    ]
    curves = {curve.label: curve for curve in parameter_curves(parameters, "layer")}
    assert list(curves) == ["conv", "other", "conv bias", "other bias", "other layers"]
    assert curves["conv"].names == ("c1.weight", "c2.weight")
    assert curves["conv"].depths.tolist() == [0, 1]


def test_without_blocks_two_matrices_of_a_layer_are_told_apart_by_their_kind() -> None:
    parameters = [
        Parameter(f"r{depth}.weight_{kind}", "mixer", 0, depth, (2, 2))
        for depth in (0, 1)
        for kind in ("ih", "hh")
    ]
    curves = parameter_curves(parameters, "layer")
    assert [curve.label for curve in curves] == ["mixer weight_ih", "mixer weight_hh"]


def test_without_blocks_nothing_is_said_to_be_after_them() -> None:
    sites = [Site("0", "conv", 0, 0), Site("1", "conv", 0, 1), Site("unused", "conv")]
    assert [curve.label for curve in site_curves(sites)] == [
        "layers in call order", "other layers",
    ]  # fmt: skip


def test_without_any_depth_the_layers_keep_their_order() -> None:
    (curve,) = site_curves([Site("a", "other"), Site("b", "other")])
    assert (curve.label, curve.depths.tolist()) == ("layers in order", [0, 1])


SITES = st.lists(
    st.builds(
        Site,
        path=st.text(st.sampled_from("ab.01"), max_size=6),
        role=st.sampled_from(ROLES),
        stack=st.integers(0, 1),
        depth=st.integers(-1, 3),
    ),
    max_size=12,
)


@given(SITES)
def test_every_site_is_in_exactly_one_curve_and_depths_do_not_repeat_in_it(
    sites: list[Site],
) -> None:
    curves = site_curves(sites)
    columns = [int(column) for curve in curves for column in curve.columns]
    assert sorted(columns) == list(range(len(sites)))
    for curve in curves:
        if curve.joined:
            assert len(set(curve.depths.tolist())) == len(curve.depths)


def test_of_a_crowd_of_experts_the_median_and_the_extremes_are_curves() -> None:
    experts = {0: 20, 1: 17}  # a block may have fewer
    names = [f"h.{block}.experts.{i}.up" for block in experts for i in range(experts[block])]
    shared = [f"h.{block}.shared.up" for block in experts]
    curves = parameter_curves(
        [Parameter(name, "up", 0, int(name[2]), (2, 2), 4) for name in names + shared]
    )
    assert [curve.label for curve in curves] == [
        "experts.*.up, median", "experts.*.up, lowest", "experts.*.up, highest", "shared.up",
    ]  # fmt: skip
    assert curves[1].names == (
        "lowest of 20, h.0.experts.*.up", "lowest of 17, h.1.experts.*.up",
    )  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(3, 39)).astype(np.float32)
    rows[1, 5] = np.nan
    rows[2, :20] = np.nan
    ways: tuple[Callable[..., Any], ...] = (np.nanmedian, np.nanmin, np.nanmax, np.sum)
    for curve, of in zip(curves, ways, strict=True):
        values = curve.values(rows)
        for step in range(3):
            for depth, own in enumerate((range(20), range(20, 37))):
                members = [37 + depth] if "shared" in curve.label else list(own)
                seen = [rows[step, i] for i in members if not np.isnan(rows[step, i])]
                np.testing.assert_equal(values[step, depth], of(seen) if seen else np.nan)


@pytest.mark.parametrize(("experts", "curves"), [(MOST_ALIKE, MOST_ALIKE), (MOST_ALIKE + 1, 3)])
def test_few_experts_are_drawn_each(experts: int, curves: int) -> None:
    names = [f"h.{block}.experts.{i}" for block in range(2) for i in range(experts)]
    found = site_curves([Site(name, "experts", 0, int(name[2])) for name in names])
    assert len(found) == curves
