"""The arithmetic: paged KV storage, and one small interface of operators with a backend for each kind of device."""

from prism_server.ops.fp8_head import Fp8Head
from prism_server.ops.host_pages import HostPages
from prism_server.ops.interface import AttentionBatch, Ops
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.registry import make_ops

__all__ = ["AttentionBatch", "Fp8Head", "HostPages", "Ops", "PagedKV", "make_ops"]
