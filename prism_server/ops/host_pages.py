"""Pages in host memory, and their way to and from the device's pool. Every move is byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from prism_server.capacity.page_layout import PageLayout
from prism_server.ops.kv_storage import TORCH_DTYPES, PagedKV

STAGING_BYTES = 64 << 20
"""Device memory through which pages pass on their way to and from the host."""


class HostPages:
    """Room for `num_slots` pages in host memory, each one run of bytes: payload, then scales.

    `pinned`: moves are launched on a stream of their own, beside the GPU's work, and the caller does not wait. What is
    launched on the current stream after `swap_in` sees the pages. What `swap_out` reads must stay as it is, and its
    slots must not be read by the host, until `finish_event` has come. Without `pinned`, a move is over when its call
    returns.
    """

    def __init__(self, layout: PageLayout, num_slots: int, pinned: bool = False) -> None:
        self.layout = layout
        self.num_slots = num_slots
        pages = torch.empty((num_slots, layout.page_bytes), dtype=torch.uint8)
        self._beside = _SideStream(pages) if pinned else None
        payload_bytes = layout.payload_bytes_per_token * layout.page_tokens
        layer, side, _, *page = layout.payload_shape(1)
        dtype = torch.uint8 if layout.has_scales else TORCH_DTYPES[layout.kv_dtype]
        self.payload = pages[:, :payload_bytes].view(dtype).view(num_slots, layer, side, *page)
        self.scales: Tensor | None = None
        if layout.has_scales:
            self.scales = pages[:, payload_bytes:].view(torch.float32).view(num_slots, layer, side, *page[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.layout.page_bytes

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of `PagedKV.tensors`, the slot on axis 0."""
        return (self.payload,) if self.scales is None else (self.payload, self.scales)

    def finish_event(self) -> torch.cuda.Event | None:
        """When all moves launched so far are over; None where they are already. A plan that swaps ends with it."""
        return self._beside.last_event if self._beside else None

    @torch.inference_mode()
    def swap_out(self, kv: PagedKV, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device page pages[i] to host slot slots[i], byte for byte."""
        if self._beside is not None:
            self._beside.swap_out(kv, pages, slots)
            return
        index = torch.tensor(list(slots), dtype=torch.int64)
        for target, content in zip(self.tensors(), kv.gather_pages(pages), strict=True):
            target.index_copy_(0, index, content.cpu())

    @torch.inference_mode()
    def swap_in(self, kv: PagedKV, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host slot slots[i] to device page pages[i], byte for byte."""
        if self._beside is not None:
            self._beside.swap_in(kv, slots, pages)
            return
        index = torch.tensor(list(slots), dtype=torch.int64)
        kv.scatter_pages(pages, [source.index_select(0, index) for source in self.tensors()])


class _SideStream:
    """Moves of whole pages on a CUDA stream of their own: kernels between the pool and a staging area, and the copy
    engine between that and the host. Moves follow each other in the order of their calls."""

    def __init__(self, host: Tensor) -> None:
        """`host` uint8 [slots, page_bytes] becomes page-locked, exactly its bytes, for as long as this lives."""
        from prism_server.ops.triton.rows import move_pages  # Triton is only loaded where there is a GPU

        self._move_pages = move_pages
        self._host = host.view(torch.int32)
        if host.nbytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
            release = weakref.finalize(self, runtime.cudaHostUnregister, host.data_ptr())
            release.atexit = False
        rows = max(1, STAGING_BYTES // max(1, host.shape[1]))
        self._staging = torch.empty((rows, self._host.shape[1]), dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.last_event: torch.cuda.Event | None = None

    def swap_out(self, kv: PagedKV, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for some_pages, some_slots in self._parts(pages, slots):
                self._move_pages(kv, some_pages, self._staging, to_pool=False)
                for row, slot in enumerate(some_slots):
                    self._host[slot].copy_(self._staging[row], non_blocking=True)
        self.last_event = self._stream.record_event()

    def swap_in(self, kv: PagedKV, slots: Sequence[int], pages: Sequence[int]) -> None:
        compute = torch.cuda.current_stream()
        launched_before = compute.record_event()
        with torch.cuda.stream(self._stream):
            for some_pages, some_slots in self._parts(pages, slots):
                for row, slot in enumerate(some_slots):
                    self._staging[row].copy_(self._host[slot], non_blocking=True)
                self._stream.wait_event(launched_before)  # not sooner: the copies above need not wait for it
                self._move_pages(kv, some_pages, self._staging, to_pool=True)
        self.last_event = self._stream.record_event()
        compute.wait_event(self.last_event)

    def _parts(self, pages: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """As many at once as the staging area holds."""
        rows = self._staging.shape[0]
        for begin in range(0, len(pages), rows):
            yield pages[begin : begin + rows], slots[begin : begin + rows]
