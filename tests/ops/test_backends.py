"""Choosing a backend, and what choosing it may not do."""

from __future__ import annotations

import pytest
import torch

from prism_server.errors import StartupError
from prism_server.ops import make_ops


def test_a_requested_backend_that_is_not_there_is_an_error_at_start_up_never_a_silent_fallback() -> None:
    with pytest.raises(StartupError, match="'fastest'"):
        make_ops("fastest", "cpu")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(StartupError, match="known: cpu, cuda"):
        make_ops("torch", "meta")
    if not torch.cuda.is_available():
        with pytest.raises(StartupError, match="no CUDA device"):
            make_ops("auto", "cuda")


def test_auto_and_torch_are_the_torch_operators_on_a_cpu() -> None:
    assert make_ops("auto", "cpu").name == make_ops("torch", torch.device("cpu")).name == "torch"
