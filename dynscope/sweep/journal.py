"""What a sweep has done so far, beside the run file it will become, so that a killed one continues.

An SQLite file: each task is one transaction, so a task is in it whole or not at all.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dynscope.errors import InputError
from dynscope.sweep.weigh import Row, Weighed

AGAIN = "make room and call again: what is done is kept"

_TABLES = {
    "plan": "text TEXT",
    "done": "task INTEGER PRIMARY KEY",
    "rows": "checkpoint INTEGER, name TEXT, reason TEXT, numbers BLOB, "
    "PRIMARY KEY (checkpoint, name)",
    "pools": "task INTEGER, checkpoint INTEGER, name TEXT, counts BLOB, PRIMARY KEY (task, name)",
}


class Journal:
    """The journal of the sweep that ``plan`` describes; one that is of another plan starts anew.

    Raises `InputError` where another process holds it or it cannot be written.
    """

    def __init__(self, path: Path, plan: str) -> None:
        self.path = path
        try:
            self._file = self._open(plan)
        except sqlite3.OperationalError as error:
            busy = "another sweep is writing it; wait for it" if "locked" in str(error) else ""
            raise InputError(f"{path}: {busy or f'cannot be written ({error})'}") from None
        except sqlite3.DatabaseError:  # damaged: it holds nothing that cannot be done again
            path.unlink()
            self._file = self._open(plan)

    def _open(self, plan: str) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, timeout=1, isolation_level=None)
        try:
            file.execute("PRAGMA locking_mode=EXCLUSIVE")
            file.execute("PRAGMA synchronous=OFF")  # a kill loses nothing; a power cut may
            file.execute("BEGIN EXCLUSIVE")
            for name, columns in _TABLES.items():
                file.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
            if file.execute("SELECT text FROM plan").fetchone() != (plan,):
                for name in _TABLES:
                    file.execute(f"DELETE FROM {name}")
                file.execute("INSERT INTO plan VALUES (?)", (plan,))
            file.execute("COMMIT")
        except BaseException:
            file.close()
            raise
        return file

    def done(self) -> frozenset[int]:
        """The numbers of the tasks that need not be done again."""
        return frozenset(task for (task,) in self._file.execute("SELECT task FROM done"))

    def add(self, weighed: Weighed) -> None:
        """Keep what a task found; the same task a second time replaces the first."""
        with self._transaction():
            self._insert(weighed.checkpoint, weighed.rows)
            self._file.executemany(
                "INSERT OR REPLACE INTO pools VALUES (?, ?, ?, ?)",
                [(weighed.task, weighed.checkpoint, *pool) for pool in weighed.pools.items()],
            )
            self._file.execute("INSERT OR REPLACE INTO done VALUES (?)", (weighed.task,))

    def counts(self, checkpoint: int) -> Iterator[tuple[str, bytes]]:
        """The counted weights of each pool, task by task, of a checkpoint that is not complete."""
        keys = self._file.execute(
            "SELECT name, task FROM pools WHERE checkpoint = ? ORDER BY name, task", (checkpoint,)
        ).fetchall()
        for name, task in keys:  # one at a time: all of them may be large
            asked = "SELECT counts FROM pools WHERE name = ? AND task = ?"
            yield name, self._file.execute(asked, (name, task)).fetchone()[0]

    def complete(self, checkpoint: int, pooled: Mapping[str, Row]) -> None:
        """Keep the fits of the pools in place of their counts, which are large."""
        with self._transaction():
            self._insert(checkpoint, pooled)
            self._file.execute("DELETE FROM pools WHERE checkpoint = ?", (checkpoint,))

    def rows(self, checkpoint: int) -> dict[str, Row]:
        """Everything that was measured of a checkpoint, by the parameter's name."""
        asked = "SELECT name, reason, numbers FROM rows WHERE checkpoint = ?"
        return {
            name: Row(tuple(np.frombuffer(numbers).tolist()), reason)
            for name, reason, numbers in self._file.execute(asked, (checkpoint,))
        }

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Close it and delete it: the run file holds everything now."""
        self.close()
        for suffix in ("", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _insert(self, checkpoint: int, rows: Mapping[str, Row]) -> None:
        self._file.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)",
            [(checkpoint, n, r.reason, np.array(r.numbers).tobytes()) for n, r in rows.items()],
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException as error:
            if self._file.in_transaction:  # a full disk has ended it
                self._file.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise InputError(f"{self.path}: cannot be written ({error}); {AGAIN}") from None
            raise
