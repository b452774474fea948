"""One self-contained HTML page from its contents: the only place that makes markup."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template

from dynscope.reports.drawing import axes
from dynscope.reports.elements import theme
from dynscope.reports.elements.charts import Chart, Contents
from dynscope.reports.encoding import chart_json, matrices_json, script_json

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Figures(Mapping[str, "Figure"]):
    """The figures of a page by id, made when asked for."""

    def __init__(self, charts: Mapping[str, Chart]) -> None:
        self._charts = charts

    def __getitem__(self, identity: str) -> "Figure":
        from plotly.graph_objects import Figure

        return Figure(self._charts[identity].spec)

    def __iter__(self) -> Iterator[str]:
        return iter(self._charts)

    def __len__(self) -> int:
        return len(self._charts)


@dataclass(frozen=True)
class Report:
    """What a page says and draws: ``html`` is the whole page, ``figures`` its Plotly figures.

    The same runs give the same bytes.
    """

    contents: Contents

    @cached_property
    def charts(self) -> dict[str, Chart]:
        """Every chart by its id, in the order of the page."""
        cards = (card for section in self.contents.sections for card in section.cards)
        found = [chart for card in cards for chart in card.charts]
        hero = self.contents.hero
        return {chart.id: chart for chart in (*([hero] if hero else ()), *found)}

    @property
    def figures(self) -> Mapping[str, "Figure"]:
        """Plotly figures by id, at the last step; they work in a notebook as they are."""
        return Figures(self.charts)

    @cached_property
    def html(self) -> str:
        """The page; it holds all it needs and asks nothing of the network."""
        return _template().render(
            page=self.contents,
            cards={card.id for section in self.contents.sections for card in section.cards},
            css=_beside("page.css"),
            script=_beside("page.js"),
            plotly=_plotly(),
            payload=script_json(self._payload()),
        )

    def _payload(self) -> dict[str, Any]:
        charts = self.charts
        return matrices_json(charts.values()) | {
            "charts": {identity: chart_json(chart) for identity, chart in charts.items()},
            "slider": self.contents.slider.tolist(),
            "beforeFirst": axes.BEFORE_FIRST,
            "templates": {"light": theme.LIGHT, "dark": theme.DARK},
        }


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_beside("page.html"))


def _beside(name: str) -> str:
    return files("dynscope.reports").joinpath(name).read_text("utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")
