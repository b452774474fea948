"""Fixtures of the tests of reported cases."""

from typing import Any, NoReturn

import pytest

import dynscope.writing.feed
from dynscope.writing.link import NoProcess


@pytest.fixture
def quick_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is written by a thread: no process to start where a test is about hooks."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NoProcess("a test wants it so")

    monkeypatch.setattr(dynscope.writing.feed, "ProcessLink", refuse)
