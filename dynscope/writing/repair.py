"""Mend a run whose writer was killed."""

import os

from dynscope.reading.run import Run
from dynscope.runfile.schema import Header
from dynscope.writing.writer import RunWriter


def repair(path: str | os.PathLike[str]) -> Run:
    """Put what is committed in a clean, compressed, closed file, in place of the one at ``path``.

    Raises `InputError` when it is not a run or a living process writes it. A closed run comes out
    as it was.
    """
    run = Run(path)
    metadata = run.metadata
    header = Header(
        metrics=run.metrics,
        name=metadata.name,
        config=metadata.config,
        versions=metadata.versions,
        world_size=metadata.world_size,
        settings=metadata.settings,
        anatomy=metadata.anatomy,
        optimizer_groups=run.optimizer_groups,
        segments=metadata.segments,
    )
    RunWriter(path, header, resume=True).close()
    return Run(path)
