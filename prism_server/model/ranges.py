"""Ranges of files to tensors on the device: several readers, each with a small ring of buffers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prism_server.errors import StartupError

PIECE_BYTES = 16 << 20
"""Long enough for a disk and for a copy to the device, short enough that many readers end together."""
BUFFERS_PER_READER = 2
"""One is filled while the other is copied."""
MOST_READERS = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: contiguous, little-endian, from byte `offset` of `file` on."""

    name: str
    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Values `begin` to `end` of one tensor in row-major order."""

    stored: StoredTensor
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.stored.dtype.itemsize


def default_readers() -> int:
    return min(MOST_READERS, os.cpu_count() or 1)


def read_tensors(
    stored: Iterable[StoredTensor],
    targets: Mapping[str, Tensor],
    num_readers: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Fill `targets`, contiguous and of the stored shapes, on one device and in one type of floating point.

    `on_bytes` hears from any reader, one at a time, how many bytes of a file it has read. Returns when all values are
    on the device. Raises StartupError, naming the file, for one that cannot be read to the end of its tensors.
    """
    pieces = deque(piece for tensor in stored for piece in _pieces(tensor))
    work = _Work(pieces, {name: tensor.view(-1) for name, tensor in targets.items()}, on_bytes)
    with ThreadPoolExecutor(num_readers, "prism-read") as pool:
        for reader in [pool.submit(work.read) for _ in range(num_readers)]:
            reader.result()


def _pieces(stored: StoredTensor) -> Iterable[Piece]:
    step = PIECE_BYTES // stored.dtype.itemsize
    for begin in range(0, stored.num_values, step):
        yield Piece(stored, begin, min(begin + step, stored.num_values))


class _Work:
    """What the readers share: the pieces that nobody has taken yet, and where they go."""

    def __init__(self, pieces: deque[Piece], targets: dict[str, Tensor], on_bytes: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._targets = targets
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def read(self) -> None:
        """One reader: piece after piece until none is left, or until one has failed."""
        device = next(iter(self._targets.values())).device
        ring = deque(_Buffer(device) for _ in range(BUFFERS_PER_READER))
        try:
            while (piece := self._take()) is not None:
                ring[0].pass_on(piece, self._targets[piece.stored.name])
                ring.rotate(1)
                with self._lock:
                    self._on_bytes(piece.num_bytes)
        except BaseException:
            with self._lock:
                self._pieces.clear()
            raise
        for buffer in ring:
            buffer.wait()

    def _take(self) -> Piece | None:
        with self._lock:
            return self._pieces.popleft() if self._pieces else None


class _Buffer:
    """Host memory, pinned for CUDA, between a file and the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        self._view = self._bytes.numpy().data
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def pass_on(self, piece: Piece, target: Tensor) -> None:
        """From the file to `target`, flat; on CUDA the copy may still be under way at the return."""
        self.wait()
        stored = piece.stored
        _read(stored.file, stored.offset + piece.begin * stored.dtype.itemsize, self._view[: piece.num_bytes])
        values = self._bytes[: piece.num_bytes].view(stored.dtype)
        if values.dtype != target.dtype:
            values = values.to(self._device, non_blocking=True)  # converted there
        target[piece.begin : piece.end].copy_(values, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until the last copy out of this buffer has ended."""
        if self._copied is not None:
            self._copied.synchronize()


def _read(file: Path, offset: int, into: memoryview) -> None:
    try:
        handle = os.open(file, os.O_RDONLY)
        try:
            while into:
                num_read = os.preadv(handle, [into], offset)
                if not num_read:
                    raise StartupError(f"{file} ended while it was read")
                into, offset = into[num_read:], offset + num_read
        finally:
            os.close(handle)
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error.strerror}") from error
