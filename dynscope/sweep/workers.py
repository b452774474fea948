"""Who does the tasks: this process, processes of this machine, or a Dask cluster.

Results come in any order, each task's once.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import TypeVar

from dynscope.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task], Result]

CONNECT_SECONDS = 20


def here(work: Work[Task, Result], tasks: Sequence[Task]) -> Iterator[Result]:
    """One after the other, in this process."""
    return map(work, tasks)


def processes(work: Work[Task, Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """In ``workers`` processes of this machine.

    Raises `InputError` when one of them is killed, as the system does where memory runs out.
    """
    pool = ProcessPoolExecutor(min(workers, len(tasks) or 1), get_context("spawn"), _begin)
    try:
        waiting = {pool.submit(work, task) for task in tasks}
        for future in as_completed(waiting):
            waiting.discard(future)  # else every result would be kept to the end
            yield future.result()
    except BrokenProcessPool:
        raise InputError(
            "a worker process was killed, perhaps for want of memory; what was done is kept: run the "
            "same command again, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Leave Ctrl-C to the process that started this one, and end with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def cluster(work: Work[Task, Result], tasks: Sequence[Task], scheduler: str) -> Iterator[Result]:
    """On the workers of the Dask scheduler at this address, which see the same paths and URLs.

    A task whose worker dies is done again by another. Raises `InputError` where Dask is not
    installed or the scheduler does not answer.
    """
    try:
        from distributed import Client
        from distributed import as_completed as as_finished
    except ImportError:
        raise InputError(
            "--scheduler needs Dask, which is not installed: pip install 'dynscope[cluster]'"
        ) from None
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{scheduler}: no Dask scheduler answers there ({error})") from None
    with client:
        futures = client.map(work, tasks, pure=False, retries=3)
        for future in as_finished(futures, loop=client.loop):
            yield future.result()
            future.release()
