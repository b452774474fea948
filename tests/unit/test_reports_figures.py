"""Figures hold the numbers of their summaries, and are figures that Plotly accepts."""

import json

import numpy as np
import pytest

from dynscope.reports import Report, compare, report
from dynscope.reports.axes import depth_axis, log_ticks, value_axis
from dynscope.reports.curves import site_curves
from dynscope.run import Run
from tests.factories import make_run, make_sites


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("runs") / "run.h5", blocks=5, steps=12))


@pytest.fixture(scope="module")
def page(run: Run) -> Report:
    return report(run)


def test_every_figure_is_a_plotly_figure(page: Report) -> None:
    for identity, figure in page.figures.items():
        assert figure.data, identity
        json.loads(figure.to_json())


def test_no_figure_needs_webgl(page: Report) -> None:
    kinds = {trace.type for figure in page.figures.values() for trace in figure.data}
    assert kinds == {"scatter", "heatmap"}


def test_every_recorded_metric_over_depth_has_a_profile(run: Run, page: Report) -> None:
    names = {card.name for section in page.contents.sections for card in section.cards}
    depth = {m.name for m in run.metrics if m.axes[-1] in ("site", "parameter")}
    assert depth <= names


def test_every_chart_says_how_to_read_it_and_where_it_comes_from(page: Report) -> None:
    for section in page.contents.sections:
        for card in section.cards:
            assert all((card.title, card.definition, card.reading, card.source)), card.id


def test_a_profile_shows_the_last_step_and_the_map_all_of_them(run: Run, page: Report) -> None:
    array = run["activation/rms"]
    stream = array.values[:, array.role.values == "block"]
    profile = next(
        t for t in page.figures["activation-rms-profile"].data if t.name == "residual stream"
    )
    np.testing.assert_array_equal(np.asarray(profile.y, np.float32), stream[-1])
    heat = page.figures["activation-rms-map"].data[0]
    np.testing.assert_array_equal(np.asarray(heat.customdata, np.float32), stream.T)
    np.testing.assert_allclose(heat.z, np.log10(stream.T), rtol=1e-6)


def test_weibull_k_is_drawn_with_the_half_normal_line_and_the_band(page: Report) -> None:
    shapes = page.figures["weight-weibull_k-profile"].layout.shapes
    assert {(shape.y0, shape.y1) for shape in shapes} == {(1.2054, 1.2054), (1.186, 1.204)}


def test_a_comparison_has_a_trace_for_each_run(run: Run) -> None:
    figure = compare([run, run], ["x", "y"]).figures["activation-variance-profile"]
    shown = [trace.name for trace in figure.data if trace.visible is True]
    assert shown == ["a: x", "b: y"]


def test_a_logarithmic_axis_has_readable_ticks_whatever_its_span() -> None:
    for low, high in ((0, 0.02), (-7, 3), (0.1, 0.4), (-30, 30), (2, 2.9)):
        ticks = log_ticks(low, high)
        assert 2 <= len(ticks["tickvals"]) <= 12, (low, high)
        assert len(set(ticks["ticktext"])) == len(ticks["ticktext"]) or high - low < 0.05


def test_axes_hold_what_is_drawn() -> None:
    axis = depth_axis(site_curves(make_sites(48)))
    assert axis["ticktext"][-2:] == ["emb", "end"] or {"emb", "end"} <= set(axis["ticktext"])
    low, high = value_axis("x", False, [np.array([1, np.nan, 5.0])])["range"]
    assert low < 1 and high > 5
    assert "range" not in value_axis("x", True, [np.array([np.nan])])
