"""Read what a killed writer left: a live file that nobody writes, perhaps shorter than it says.

HDF5's reading mode for live files does not help here: it waits practically for ever for metadata
that is damaged or beyond the end of the file, and reads numbers beyond it as zeros. So HDF5 reads the file through a
Python object that shows it as an ordinary file and notes when bytes that are missing were needed.
"""

import io
import struct
from pathlib import Path
from typing import Any

SUPERBLOCK = 48  # bytes, of version 2 and 3
FLAGS, LENGTH, CHECKSUM = 11, slice(28, 36), slice(44, 48)


def is_live(head: bytes) -> bool:
    """Whether a superblock is marked as open for writing."""
    return head[8] in (2, 3) and bool(head[FLAGS] & 1)


def stated_length(head: bytes) -> int:
    """How long the file should be by its superblock."""
    (length,) = struct.unpack("<Q", head[LENGTH])
    return int(length)


class ShortFile(io.RawIOBase):
    """A live file, perhaps without its end, as one that is not marked as open for writing.

    Its superblock is shown with the length that the file has, if that is longer than what it says.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb")
        head = bytearray(self._stream.read(SUPERBLOCK))
        # A writer may be killed after it has written a chunk and before it says how long the file is.
        self._length = max(stated_length(bytes(head)), path.stat().st_size)
        head[LENGTH] = struct.pack("<Q", self._length)
        head[FLAGS] = 0
        head[CHECKSUM] = struct.pack("<I", lookup3(bytes(head[: CHECKSUM.start])))
        self._head = bytes(head)
        self._position = 0
        self.path = path
        self.missed = False  # whether a missing byte was asked for

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._position)
        content = self._head[self._position : self._position + len(view)]
        if content:
            self._stream.seek(SUPERBLOCK)
        content += self._stream.read(len(view) - len(content))
        # h5py crashes when this raises; zeros as metadata are an error of HDF5's own.
        self.missed |= len(content) < len(view)
        view[:] = content.ljust(len(view), b"\0")
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        self._stream.close()
        super().close()


def lookup3(data: bytes) -> int:
    """Bob Jenkins' lookup3 hash, with which HDF5 guards its superblock."""
    mask = 0xFFFFFFFF
    a = b = c = 0xDEADBEEF + len(data)
    padded = data + bytes(-len(data) % 12)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)

    def rotate(x: int, k: int) -> int:
        return (x << k | x >> 32 - k) & mask

    for i in range(0, len(words) - 3, 3):
        a, b, c = a + words[i] & mask, b + words[i + 1] & mask, c + words[i + 2] & mask
        a = (a - c & mask) ^ rotate(c, 4)
        c = c + b & mask
        b = (b - a & mask) ^ rotate(a, 6)
        a = a + c & mask
        c = (c - b & mask) ^ rotate(b, 8)
        b = b + a & mask
        a = (a - c & mask) ^ rotate(c, 16)
        c = c + b & mask
        b = (b - a & mask) ^ rotate(a, 19)
        a = a + c & mask
        c = (c - b & mask) ^ rotate(b, 4)
        b = b + a & mask
    a, b, c = a + words[-3] & mask, b + words[-2] & mask, c + words[-1] & mask
    c = (c ^ b) - rotate(b, 14) & mask
    a = (a ^ c) - rotate(c, 11) & mask
    b = (b ^ a) - rotate(a, 25) & mask
    c = (c ^ b) - rotate(b, 16) & mask
    a = (a ^ c) - rotate(c, 4) & mask
    b = (b ^ a) - rotate(a, 14) & mask
    return int((c ^ b) - rotate(b, 24) & mask)
