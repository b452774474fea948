"""Figures hold the numbers of their summaries, and are figures that Plotly accepts."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynscope.catalogue import METRICS
from dynscope.reading.run import Run
from dynscope.reports import Report, compare, report
from dynscope.reports.drawing.axes import BEFORE_FIRST, depth_axis, log_ticks, step_axis, value_axis
from dynscope.reports.drawing.figures import lines_chart, profile_chart
from dynscope.reports.numbers.curves import site_curves
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.numbers.summaries import Line, profile
from dynscope.runfile.schema import Header
from dynscope.writing.writer import RunWriter
from tests.factories import make_parameters, make_run, make_sites


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


def test_words_on_a_deep_axis_stand_below_the_numbers() -> None:
    ticks = depth_axis(site_curves(make_sites(30)))
    texts = dict(zip(ticks["tickvals"], ticks["ticktext"], strict=True))
    assert texts[0] == "0"
    assert texts[-1] == "\u00a0<br>emb" and texts[30] == "\u00a0<br>end"


def test_steps_are_ticked_at_whole_numbers_also_on_a_logarithmic_axis() -> None:
    few = step_axis([1, 2, 4])
    assert few["ticktext"] == ["1", "2", "3", "4"]
    log = step_axis([0, 1, 2, 4], log=True)
    assert log["tickvals"] == [BEFORE_FIRST, 1, 2, 4] and log["ticktext"] == ["0", "1", "2", "4"]
    long = step_axis([0, *(2**i for i in range(15))], log=True)
    assert long["ticktext"][0] == "0" and 4 <= len(long["tickvals"]) <= 10
    assert "tickvals" not in step_axis([1, 5000])
    assert "tickvals" not in step_axis()


def test_weights_measured_before_the_first_step_are_on_the_map(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.h5", Header((METRICS["weight/weibull_k"],)))
    writer.parameters(make_parameters(3))
    for step in (0, 1, 2, 4):
        k = np.linspace(1.1, 1.2 + step / 100, len(make_parameters(3)), dtype=np.float32)
        writer.weights(step, 1.7e9 + step, {"weight/weibull_k": k})
    writer.close()
    figure = report(Run(tmp_path / "run.h5")).figures["weight-weibull_k-map"]
    assert list(figure.data[0].x) == [BEFORE_FIRST, 1, 2, 4]
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2", "4"]


def test_the_legend_names_the_law_or_the_jump(tmp_path: Path) -> None:
    measured = Measured(Run(make_run(tmp_path / "run.h5", blocks=8, steps=3)))
    variance = measured.array("activation/variance")
    for site, column in zip(measured.run.sites, range(variance.shape[1]), strict=True):
        if site.role == "block":
            variance[-1, column] = 3 if site.depth < 5 else 900
    found = profile(measured, METRICS["activation/variance"])
    chart = profile_chart(found, "x")
    assert chart.captions[0].endswith(" law")
    assert chart.captions[-1] == chart.spec["data"][-1]["name"] == "jump × 300 at block 5"
    assert chart.notes[-1] == "Residual stream: jumps 300-fold at block 5 (no law fits)."
    drawn = chart.spec["data"][-1]["y"]
    assert np.flatnonzero(np.isfinite(drawn)).tolist() == [4, 5]


def test_lines_without_a_number_are_no_chart_and_a_single_number_is_a_mark() -> None:
    steps = np.arange(1, 4)
    nothing = Line("a", steps, np.full(3, np.nan))
    single = Line("b", steps, np.array([np.nan, 2.0, np.nan]))
    assert lines_chart([nothing], "x", "y") == ()
    (chart,) = lines_chart([nothing, single], "x", "y")
    assert [(one["name"], one["mode"]) for one in chart.spec["data"]] == [("b", "markers")]


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
    assert {"emb", "end"} <= set(depth_axis(site_curves(make_sites(4)))["ticktext"])
    low, high = value_axis("x", False, [np.array([1, np.nan, 5.0])])["range"]
    assert low < 1 and high > 5
    assert "range" not in value_axis("x", True, [np.array([np.nan])])


def test_a_constant_line_is_drawn_around_its_value() -> None:
    line = Line("lr", np.arange(1, 5), np.full(4, 0.002))
    (chart,) = lines_chart([line], "lr", "learning rate", False)
    low, high = chart.spec["layout"]["yaxis"]["range"]
    assert 0.001 < low < 0.002 < high < 0.003
