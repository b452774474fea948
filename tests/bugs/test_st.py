"""Step numbers as users give them, each case by its id."""

from pathlib import Path

import numpy as np

from dynscope.catalogue import METRICS
from dynscope.reading.run import load
from dynscope.reports.numbers.measured import Measured
from dynscope.reports.wording import facts
from dynscope.runfile.schema import Header
from dynscope.site import Site
from dynscope.writing.feed import Feed
from dynscope.writing.repair import repair

HEADER = Header(metrics=(METRICS["activation/variance"],))


class Tensor:
    """A 0-dim tensor as far as this room knows them."""

    def __int__(self) -> int:
        return 5


def test_st_03_a_resumed_run_continues_in_a_new_segment(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    for steps, resume in (((1, 2, 3), False), ((3, 4), True)):
        feed = Feed(path, HEADER, resume=resume)
        assert feed.last_step == (3 if resume else 0)
        feed.sites([Site("b", "block"), Site("a", "block")] if resume else [Site("a", "block")])
        for step in steps:
            values = [7.0, 10 * step] if resume else [float(step)]
            feed.row(step, 0.0, {"activation/variance": np.array(values)})
            feed.scalars(step, 0.0, {"loss": 10 * step if resume else step})
        feed.close()
    run = load(path)
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert [site.path for site in run.sites] == ["a", "b"]
    variance = run["activation/variance"].values
    assert variance[:, 0].tolist() == [1, 2, 30, 40]  # the later row of step 3
    assert np.isnan(variance[:2, 1]).all()
    assert variance[2:, 1].tolist() == [7, 7]
    assert run["clock/segment"].values.tolist() == [0, 0, 1, 1]
    assert run.scalars("loss").values.tolist() == [1, 2, 30, 40]
    assert run.segments == 2


def test_st_05_steps_repeat_go_back_and_are_large_and_of_any_integer_type(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    feed = Feed(path, HEADER)
    feed.sites([Site("a", "block")])
    steps = [np.int64(5), Tensor(), 2**40, 5, 3, np.int32(2**31 - 1), 2**31, 10**30, np.uint8(9)]
    for i, step in enumerate(steps):
        feed.row(step, 0.0, {"activation/variance": np.array([float(i)])})  # type: ignore[arg-type]
        feed.scalars(step, 0.0, {"loss": np.float32(i)})  # type: ignore[arg-type, dict-item]
    feed.close()
    run = load(path)
    assert run.steps.tolist() == [3, 5, 9, 2**31 - 1, 2**31, 2**40]
    assert run["activation/variance"].values[:, 0].tolist() == [4, 3, 8, 5, 6, 2]
    assert run.scalars("loss").values.tolist() == [4, 3, 8, 5, 6, 2]
    assert any("not recorded" in event.message for event in run.events)  # 10**30


def test_st_03_each_segment_keeps_its_own_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    for i, rate in enumerate([0.1, 0.1, 0.2, 0.3]):
        header = Header(HEADER.metrics, config={"lr": rate, "shape": (1, 2)})
        feed = Feed(path, header, resume=i > 0)
        feed.sites([Site("a", "block")])
        feed.row(i + 1, 0.0, {"activation/variance": np.array([1.0])})
        feed.close()
    for _ in range(2):
        metadata = load(path).metadata
        assert metadata.config["lr"] == 0.3
        spans = [(s["segment"], s["until"], s["config"]["lr"]) for s in metadata.segments]
        assert spans == [(0, 1, 0.1), (2, 2, 0.2)]
        rows = facts.facts(Measured(load(path)))
        assert ("Segment 0-1 had", "lr = 0.1") in rows and ("Segment 2 had", "lr = 0.2") in rows
        repair(path)
