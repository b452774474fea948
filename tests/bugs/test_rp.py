"""One test for each known way in which pages about training runs go wrong."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from dynscope.catalogue import METRICS, Metric
from dynscope.cli import main
from dynscope.reading.run import Run
from dynscope.reports import compare, report
from dynscope.reports.elements.charts import Card
from dynscope.runfile.schema import Header
from dynscope.site import Parameter, Site
from dynscope.writing.writer import RunWriter
from tests.factories import make_run

NAMES = ("50%{y}", "<script>alert(1)</script>", "\"q'</td>&amp;", "名前\u2028x",
         '<a href="http://example.com">l</a>', "{{7*7}}")  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile_run(path: Path) -> Path:
    """A run whose every text tries to be markup or a template."""
    own = Metric(
        "own/it", ("step", "site"), "%{y}</script>", "<script>1</script>", "%{x}", "<i>s</i>"
    )
    metrics = (*METRICS.values(), own)
    header = Header(metrics, name="</title><script>alert(3)</script>", config={"<b>": "</script>"})
    writer = RunWriter(path, header)
    sites = [Site(f"{name}.{i}", "block" if name == NAMES[0] else "ffn", 0, i, name)
             for i in range(3) for name in NAMES]  # fmt: skip
    writer.sites(sites)
    writer.parameters(
        [Parameter(f"{site.path}.weight", "up", 0, site.depth, (2, 2), 4) for site in sites]
    )
    values = np.linspace(1, 2, len(sites), dtype=np.float32)
    for step in (1, 2, 2**40):
        writer.row(
            step,
            1.7e9 + step,
            {name: values for name in ("activation/rms", "own/it", "gradient/norm")},
        )
        writer.scalars(step, 1.7e9, dict.fromkeys(NAMES, 1.0))
    writer.coverage(1, "site", "<img src=x onerror=alert(4)>", "activation/rms", "<script>")
    writer.close()
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(hostile_run(tmp_path_factory.mktemp("runs") / "hostile.h5"))


def test_rp_02_names_are_never_interpreted(hostile: Run) -> None:
    page = report(hostile)
    for figure in page.figures.values():
        for trace in figure.data:
            template = trace.hovertemplate or ""
            assert not any(name in template for name in NAMES)
            assert "<" not in (trace.name or "") and "%{" not in (trace.name or "")
    scripts = [attributes for tag, attributes in Tags(page.html).found if tag == "script"]
    assert len(scripts) == 4, "theme, plotly, payload, page"
    tags = {tag for tag, _ in Tags(page.html).found}
    assert not tags & {"img", "i", "iframe", "object"}
    assert "{{7*7}}" in page.html or "{{7*7}}".replace("'", "&#39;") in page.html


def test_rp_03_nothing_is_asked_of_the_network(hostile: Run) -> None:
    for tag, attributes in Tags(report(hostile).html).found:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:,")) or not value, (tag, value)
    text = report(hostile).html.replace(get_plotlyjs(), "")
    assert "@import" not in text and "url(" not in text
    assert "showSendToCloud: false" in text


def test_rp_04_plotly_is_embedded_exactly_once(hostile: Run) -> None:
    for page in (report(hostile), compare([hostile, hostile])):
        assert page.html.count("* plotly.js v") == 1


def test_rp_06_no_figure_uses_webgl(hostile: Run) -> None:
    kinds = {trace.type for figure in report(hostile).figures.values() for trace in figure.data}
    assert not any(kind.endswith("gl") for kind in kinds)


def test_every_card_names_its_unit(tmp_path: Path) -> None:
    page = report(Run(make_run(tmp_path / "run.h5", blocks=2, steps=3)))
    units = {card.id: card.unit for s in page.contents.sections for card in s.cards}
    assert all(units.values())
    assert units["activation-kurtosis"] == units["training-lr"] == "no unit"
    assert units["activation-rms"] == "model units"


def test_rp_08_three_hundred_blocks_are_one_map(tmp_path: Path) -> None:
    wanted = tuple(METRICS[name] for name in ("activation/rms", "gradient/norm"))
    run = Run(make_run(tmp_path / "deep.h5", blocks=300, steps=3, metrics=wanted))
    figure = report(run).figures["activation-rms-map"]
    assert figure.data[0].z.shape == (300, 3)
    assert len(figure.layout.yaxis.tickvals) <= 13


@pytest.mark.parametrize("blocks", [1, 3])
def test_rp_09_one_step_is_drawn_with_markers(tmp_path: Path, blocks: int) -> None:
    page = report(Run(make_run(tmp_path / "one.h5", blocks=blocks, steps=1)))
    assert "markers" in page.figures["activation-rms-profile"].data[0].mode
    assert page.figures["training-loss"].data[0].mode == "markers"
    assert "<h1" in page.html


def test_rp_09_a_metric_without_a_number_says_why(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "nan.h5", Header((METRICS["activation/rms"],)))
    writer.sites([Site("0", "other", 0, 0)])
    for step in (1, 2):
        writer.row(step, 1.7e9 + step, {"activation/rms": np.array([np.nan], np.float32)})
    writer.coverage(1, "site", "0", "activation/rms", "overwritten in place")
    writer.close()
    page = report(Run(tmp_path / "nan.h5"))
    (card,) = (c for s in page.contents.sections for c in s.cards if c.name == "activation/rms")
    assert card.charts == ()
    assert card.remark == "No value was recorded. Reason: overwritten in place."


def test_rp_09_what_was_never_measured_is_named_and_has_no_card(tmp_path: Path) -> None:
    wanted = ("activation/rms", "gradient/norm_before_clip", "weight/weibull_k")
    path = tmp_path / "never.h5"
    writer = RunWriter(path, Header(tuple(METRICS[name] for name in wanted)))
    writer.sites([Site("0", "other", 0, 0)])
    writer.parameters([Parameter("0.weight", "other", 0, 0, (2, 2), 4)])
    for step in (1, 2):
        writer.row(step, 1.7e9 + step, {"activation/rms": np.ones(1, np.float32)})
        writer.scalars(step, 1.7e9 + step, {"loss": np.nan})
    writer.close()
    sections = report(Run(path)).contents.sections
    cards = [card for section in sections for card in section.cards]
    assert {"gradient/norm_before_clip", "weight/weibull_k"}.isdisjoint(c.name for c in cards)
    assert [c.remark for c in cards if not c.charts] == ["No finite value was logged."]
    (table,) = (t for s in sections for t in s.tables if t.title.startswith("Not recorded"))
    expected = "Never measured in this run: gradient/norm_before_clip and weight/weibull_k."
    assert table.remark == expected


def test_rp_09_a_run_without_anything_says_so(tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty.h5", Header(())).close()
    run = Run(tmp_path / "empty.h5")
    assert "holds no recorded step" in report(run).html
    assert compare([run, run]).html


def test_rp_10_the_same_runs_give_the_same_bytes(hostile: Run) -> None:
    assert report(Run(hostile.path)).html == report(Run(hostile.path)).html
    assert compare([hostile, hostile]).html == compare([hostile, hostile]).html


def test_rp_11_a_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run.h5", blocks=1, steps=1)
    page = tmp_path / "run.report.html"
    page.write_text("old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr("sys.argv", ["dynscope", "report", str(run), "--force"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "No space left on device" in capsys.readouterr().err
    assert page.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.h5", "run.report.html"]


def test_rp_13_other_depths_lengths_and_intervals_are_compared_where_they_meet(
    tmp_path: Path,
) -> None:
    a = Run(make_run(tmp_path / "a.h5", blocks=4, steps=10))
    b = Run(make_run(tmp_path / "b.h5", blocks=6, steps=7, every=2))
    page = compare([a, b])
    heat = page.figures["activation-rms-difference"].data[0]
    assert list(heat.x) == [1, 3, 5, 7, 9]
    assert list(heat.y) == [0, 1, 2, 3]
    (alone,) = (table for table in page.contents.tables if table.title == "Not in every run")
    assert ("layer", "blocks.4", "b") in alone.rows
    assert page.contents.relative


def test_rp_13_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "a.h5", blocks=3, steps=5))
    page = compare([run, run])
    cards: list[Card] = [
        c for s in page.contents.sections[1:] for c in s.cards if c.id != "massive"
    ]
    assert {card.remark for card in cards if card.charts} == {
        "No difference at any common layer and step."
    }
    assert page.contents.statements[0].text == "No value at any common layer and step differs."
    assert [badge.label for badge in page.contents.badges] == ["a", "b"]


def test_rp_15_steps_beyond_32_and_53_bits_are_right(hostile: Run) -> None:
    page = report(hostile)
    assert int(page.figures["activation-rms-map"].data[0].x[-1]) == 2**40
    assert re.search(r'"steps":\{"0":\[1,2,1099511627776\]', page.html)
    assert "1,099,511,627,776" in page.html
