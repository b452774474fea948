"""The one-visit reduction for CPU tensors: ``fused.c``, compiled once in the background.

A recorder starts the compilation when it attaches and uses `dynscope.hooks.tensor.reduce` until the
library is there; where no C compiler is found it does so for ever. The library is cached per
source, compiler and processor.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("fused.c")
SUFFIXES = MappingProxyType(
    {torch.float32: "_float32", torch.bfloat16: "_bfloat16", torch.float16: "_float16"}
)
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
# OpenMP is left undefined in the library, so that it resolves to the one torch has loaded: a
# second OpenMP runtime would keep a second set of threads spinning.
_OPENMP = ("-fopenmp", "-nodefaultlibs", "-lc", "-lm")


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(line for line in lines[:64] if line.startswith(("flags", "model name")))


def _library_path(compiler: str) -> Path:
    key = SOURCE.read_bytes() + (compiler + _processor() + repr((_FLAGS, _OPENMP))).encode()
    name = f"fused-{hashlib.sha256(key).hexdigest()[:16]}.so"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache) / "dynscope"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder / name
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="dynscope-")) / name


class Row(ctypes.Structure):
    """Where in memory a row of the tally is, and how flat indices are located: see fused.c."""

    _fields_ = [
        ("sums", ctypes.c_void_p),
        ("absmax", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("histogram", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 3),
        ("length", ctypes.c_int64 * 3),
    ]


class Library:
    """The compiled functions of ``fused.c``. Calls must not overlap: they share their results."""

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        pointer, integer, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._observe, self._squares = {}, {}
        for dtype, suffix in SUFFIXES.items():
            if hasattr(dll, "observe" + suffix):
                observe, squares = (getattr(dll, f + suffix) for f in ("observe", "squares"))
                observe.argtypes = [pointer, pointer, integer, integer, integer, count]
                squares.argtypes = [pointer, integer, count, pointer]
                self._observe[dtype], self._squares[dtype] = observe, squares
        self._add_to = dll.add_to
        self._add_to.argtypes = [ctypes.POINTER(Row), count]
        self.serial = 0  # of the last observe call
        self._out = np.empty(3)
        self._out_address = self._out.ctypes.data

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(self._observe)

    def observe(self, x: Tensor, reference: Tensor | None, stride: int) -> None:
        """Find the statistics of a contiguous tensor, for `add_to`."""
        columns = x.shape[-1] if x.dim() else 1
        self.serial += 1
        self._observe[x.dtype](
            x.data_ptr(),
            None if reference is None else reference.data_ptr(),
            x.numel() // columns,
            columns,
            stride,
            torch.get_num_threads(),
        )

    def add_to(self, row: Row, paired: bool) -> None:
        """Add what the last `observe` found to a row of the tally."""
        self._add_to(ctypes.byref(row), paired)

    def squares(self, x: Tensor) -> tuple[float, float, float]:
        """Sum of squares, non-finite count and largest magnitude of a contiguous tensor."""
        self._squares[x.dtype](x.data_ptr(), x.numel(), torch.get_num_threads(), self._out_address)
        total, nonfinite, absmax = self._out.tolist()
        return total, nonfinite, absmax


class Compilation:
    """The library, being made: `library` is None until it is there, `reason` says why not."""

    def __init__(self, wanted: bool = True) -> None:
        self.library: Library | None = None
        self.reason = "" if wanted else "switched off by DYNSCOPE_FUSED=0"
        self._process: subprocess.Popen[bytes] | None = None
        compiler = _compiler() if wanted else None
        if compiler is None:
            self.reason = self.reason or "no C compiler found"
            return
        self._path = _library_path(compiler)
        self._commands = [
            [compiler, *_FLAGS, str(SOURCE), "-o", self._made, *extra] for extra in (_OPENMP, ())
        ]
        if self._path.exists():
            self._load(self._path)
        if self.library is None:
            self._start()

    @staticmethod
    def shared() -> "Compilation":
        """The one of this process: recorders side by side compile once."""
        return _shared(os.environ.get("DYNSCOPE_FUSED") != "0")

    @property
    def _made(self) -> str:
        return f"{self._path}.{os.getpid()}"

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._commands.pop(0),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            self.reason = str(error)

    def _load(self, path: Path) -> bool:
        try:
            self.library = Library(path)
        except OSError as error:
            self.reason = str(error)
        return self.library is not None

    def poll(self, wait: bool = False) -> Library | None:
        """The library as soon as it is there; ``wait`` stays until that is decided."""
        while self._process is not None:
            if not wait and self._process.poll() is None:
                return None
            failed = self._process.wait() != 0
            self._process = None
            if not failed and self._load(Path(self._made)):
                os.replace(self._made, self._path)
                return self.library
            self.reason = self.reason or "the C compiler failed"
            if self._commands:
                self._start()
        return self.library


@cache
def _shared(wanted: bool) -> Compilation:
    return Compilation(wanted)
