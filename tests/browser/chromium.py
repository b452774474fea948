"""Headless Chromium for the tests that look at a page; no request of it leaves the machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

BINARY, DRIVER = which("chromium"), which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def browser(width: int = 1440, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A driver whose window has that size and prefers light or dark."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BINARY)
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def errors(driver: Any) -> list[str]:
    """What the console holds at level warning and above."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "INFO"]
