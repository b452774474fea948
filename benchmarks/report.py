"""How long `dynscope report` takes, how big its page is, how soon a browser can be used with it.

    python -m benchmarks.report [--blocks 48] [--steps 2000] [--rounds 3]

The run is synthetic and holds every metric of the catalogue. Times are of fresh processes; usable
means that headless Chromium has run the page's script and drawn what is in view, in milliseconds
since navigation began. The aims are 5 s, 12 MB and 2 s on two cores.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.chromium import browser
from tests.factories import make_run


def report_seconds(run: Path, page: Path) -> float:
    """Wall time of the command, from start to exit."""
    command = [sys.executable, "-m", "dynscope", "report", str(run), "-o", str(page), "--force"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def usable_seconds(page: Path) -> float:
    """Time from navigation to the first drawn view."""
    with browser() as driver:
        driver.get(page.as_uri())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ready = driver.execute_script("return document.documentElement.dataset.ready")
            if ready:
                return int(ready) / 1000
            time.sleep(0.05)
    raise TimeoutError("the page was not usable within a minute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder, "run.h5"), Path(folder, "run.html")
        make_run(run, blocks=chosen.blocks, steps=chosen.steps, every=5)
        made = min(report_seconds(run, page) for _ in range(chosen.rounds))
        usable = min(usable_seconds(page) for _ in range(chosen.rounds))
        size = run.stat().st_size / 1e6
        print(f"{chosen.blocks} blocks, {chosen.steps} recorded steps, run file of {size:.1f} MB")
        print(f"report  {made:5.2f} s   (aim 5)")
        print(f"page    {page.stat().st_size / 1e6:5.2f} MB  (aim 12)")
        print(f"usable  {usable:5.2f} s   (aim 2)")


if __name__ == "__main__":
    main()
