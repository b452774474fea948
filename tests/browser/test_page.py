"""The page in a real browser: it draws, it moves, it complains of nothing, it asks for nothing."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynscope.reading.run import Run
from dynscope.reports import compare, report
from tests.browser.chromium import BINARY, DRIVER, browser, errors
from tests.bugs.test_rp import hostile_run
from tests.factories import make_run

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pages")
    one = Run(make_run(found / "one.h5", blocks=4, steps=12))
    two = Run(
        make_run(found / "two.h5", blocks=6, steps=12, every=2, seed=1, growth=0.6, name="two")
    )
    (found / "one.html").write_text(report(one).html)
    (found / "pair.html").write_text(compare([one, two]).html)
    (found / "hostile.html").write_text(report(Run(hostile_run(found / "hostile.h5"))).html)
    return found


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


def open_page(driver: Any, path: Path) -> None:
    driver.get(path.as_uri())
    wait(driver, "return document.documentElement.dataset.ready")
    driver.execute_script("document.documentElement.style.scrollBehavior = 'auto'")


def wait(driver: Any, script: str, *arguments: Any) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = driver.execute_script(script, *arguments)
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"never true: {script}")


def see(driver: Any, identity: str) -> None:
    """Scroll to a chart and wait until it is drawn."""
    driver.execute_script("document.getElementById(arguments[0]).scrollIntoView()", identity)
    wait(
        driver,
        "return document.getElementById(arguments[0]).querySelector('.main-svg') !== null",
        identity,
    )


def values(driver: Any, identity: str, trace: str) -> list[float]:
    script = (
        "const trace = document.getElementById(arguments[0]).data.find((t) => t.name === arguments[1]);"
        "return Array.from(trace.y)"
    )
    return [float(value) for value in driver.execute_script(script, identity, trace)]


def requests(driver: Any) -> list[str]:
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


@pytest.mark.parametrize("page", ["one", "pair", "hostile"])
def test_a_page_opens_without_a_complaint_and_asks_nothing_of_the_network(
    driver: Any, folder: Path, page: str
) -> None:
    requests(driver), errors(driver)
    path = folder / f"{page}.html"
    open_page(driver, path)
    driver.execute_script("scrollTo(0, document.body.scrollHeight / 2)")
    time.sleep(0.5)
    assert errors(driver) == []
    assert [url for url in requests(driver) if not url.startswith(("data:", "blob:"))] == [
        path.as_uri()
    ]
    assert path.stat().st_size < 12e6


def test_charts_are_drawn_only_when_they_come_into_view(driver: Any, folder: Path) -> None:
    open_page(driver, folder / "one.html")
    drawn = "return document.querySelectorAll('.chart.drawn').length"
    assert 1 <= driver.execute_script(drawn) < 8
    see(driver, "weight-weibull_k-profile")
    assert driver.execute_script(drawn) < 20


def test_the_slider_moves_profiles_and_says_where_it_is(driver: Any, folder: Path) -> None:
    open_page(driver, folder / "one.html")
    see(driver, "activation-variance-profile")
    array = Run(folder / "one.h5")["activation/variance"]
    stream = array[:, array.role.values == "block"].values
    assert values(driver, "activation-variance-profile", "residual stream") == pytest.approx(
        stream[-1]
    )
    driver.execute_script(
        "const slider = document.getElementById('step'); slider.value = 2;"
        "slider.dispatchEvent(new Event('input'))"
    )
    wait(driver, "return document.getElementById('step-value').textContent === '3'")
    time.sleep(0.3)
    assert values(driver, "activation-variance-profile", "residual stream") == pytest.approx(
        stream[2]
    )
    caption = "return document.getElementById('activation-variance-profile').closest('figure').querySelector('.at').textContent"
    assert driver.execute_script(caption) == "at step 3"


def test_names_are_shown_as_they_are_and_run_nothing(driver: Any, folder: Path) -> None:
    open_page(driver, folder / "hostile.html")
    see(driver, "activation-rms-profile")
    script = "return [...document.querySelectorAll('#keys-activation-rms-profile button')].map((b) => b.textContent)"
    shown = driver.execute_script(script)
    assert (
        "<script>alert(1)</script>"
        not in driver.execute_script("return document.title + ''").lower()[:5]
    )
    assert len(shown) >= 3
    assert (
        driver.execute_script(
            "return document.querySelectorAll('img, .keys a, .keys script').length"
        )
        == 0
    )


@pytest.mark.slow
def test_everything_on_a_page_can_be_drawn(driver: Any, folder: Path) -> None:
    for page in ("one", "pair", "hostile"):
        open_page(driver, folder / f"{page}.html")
        for identity in driver.execute_script(
            "return [...document.querySelectorAll('.chart')].map((c) => c.id)"
        ):
            see(driver, identity)
        assert errors(driver) == []


@pytest.mark.slow
def test_buttons_do_what_they_say(driver: Any, folder: Path) -> None:
    open_page(driver, folder / "pair.html")
    see(driver, "activation-variance-profile")
    press = "document.querySelector(arguments[0]).click()"
    axis = "return document.getElementById('activation-variance-profile').layout"
    assert driver.execute_script(axis)["xaxis"]["title"]["text"] == "relative depth"
    driver.execute_script(press, "#relative")
    assert driver.execute_script(axis)["xaxis"]["title"]["text"] == "block"
    assert driver.execute_script(axis)["yaxis"]["type"] == "log"
    driver.execute_script(press, "button.log[data-chart='activation-variance-profile']")
    assert driver.execute_script(axis)["yaxis"]["type"] == "linear"
    driver.execute_script(press, "#theme")
    assert driver.execute_script("return document.documentElement.classList.contains('dark')")
    driver.execute_script(press, "#card-activation-variance .numbers")
    assert "blocks" not in driver.execute_script(
        "return document.querySelector('.card .scroll').textContent"
    )
    second = "#keys-activation-variance-profile .choices button:nth-child(2)"
    driver.execute_script(press, second)
    shown = (
        "return document.getElementById('activation-variance-profile').data"
        ".filter((t) => t.visible === true).map((t) => t.legendgroup)"
    )
    assert driver.execute_script(shown) == ["attention", "attention"]
    assert errors(driver) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1440, True)])
def test_nothing_is_wider_than_the_window(folder: Path, width: int, dark: bool) -> None:
    with browser(width, 844, dark) as driver:
        for page in ("one", "pair", "hostile"):
            open_page(driver, folder / f"{page}.html")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            assert (
                driver.execute_script("return document.documentElement.classList.contains('dark')")
                is dark
            )
            assert errors(driver) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1000])
def test_the_section_that_is_read_is_in_sight_in_the_contents(folder: Path, width: int) -> None:
    sections = "return [...document.querySelectorAll('main > section')].map((one) => one.id)"
    scroll = "document.getElementById(arguments[0]).scrollIntoView()"
    shown = """
        const nav = document.querySelector("nav"), link = nav.querySelector("[aria-current]");
        const [a, b] = [nav, link].map((one) => one.getBoundingClientRect());
        return a.left <= b.left && b.right <= a.right && link.hash;
    """
    with browser(width, 844) as driver:
        open_page(driver, folder / "one.html")
        seen = set()
        for section in driver.execute_script(sections):
            for _ in range(2):  # the charts that are drawn move it
                driver.execute_script(scroll, section)
                time.sleep(0.5)
            seen.add(wait(driver, shown))
        assert len(seen) > 5


@pytest.mark.slow
def test_a_long_deep_run_fits_on_a_page_that_opens(tmp_path: Path) -> None:
    path = make_run(tmp_path / "long.h5", blocks=48, steps=2000, every=5)
    page = tmp_path / "long.html"
    page.write_text(report(Run(path)).html)
    assert page.stat().st_size <= 12e6
    with browser() as driver:
        open_page(driver, page)
        assert errors(driver) == []
        assert "of 2,000 steps drawn" in driver.execute_script("return document.body.textContent")
