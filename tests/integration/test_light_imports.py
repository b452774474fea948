"""Reading a run must work, and start quickly, where there is no torch."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "plotly")

HELP = """
from dynscope.cli import main
sys.argv = ["dynscope", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "import dynscope",
        "import dynscope.cli",
        HELP,
    ],
    ids=["import", "cli", "help"],
)
def test_neither_torch_nor_plotly_is_imported(code: str) -> None:
    report = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = run(f"import json, sys\n{code}\n{report}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_attach_without_torch_says_so_in_one_line() -> None:
    done = run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import dynscope\n"
        "try: dynscope.attach(None, 'never.h5')\n"
        "except dynscope.InputError as error: print(error)"
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "dynscope[torch]" in line
