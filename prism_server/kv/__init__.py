"""Bookkeeping of the KV cache: pages, the prefix index, the host tier. Pure: no torch, no clock, no I/O."""
