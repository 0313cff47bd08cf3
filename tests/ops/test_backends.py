"""Choosing a backend, and what choosing it may not do."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from prism_server.errors import StartupError
from prism_server.ops import make_ops
from prism_server.ops.torch_ops import TorchOps

HAS_CUDA = torch.cuda.is_available()


def test_a_requested_backend_that_is_not_there_is_an_error_at_start_up_never_a_silent_fallback() -> None:
    with pytest.raises(StartupError, match=r"'fastest'.*known: auto, torch, triton, flashinfer"):
        make_ops("fastest", "cpu")


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_the_backends_of_gpus_are_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(StartupError, match=rf"'{name}' needs an NVIDIA GPU of compute capability 8.0.*'cpu'"):
        make_ops(name, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_CUDA or importlib.util.find_spec("flashinfer") is not None, reason="needs a GPU without FlashInfer"
)
def test_flashinfer_that_is_not_installed_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(StartupError, match=r"prism-server\[cuda\]"):
        make_ops("flashinfer", "cuda")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(StartupError, match="known: cpu, cuda"):
        make_ops("torch", "meta")
    if not HAS_CUDA:
        with pytest.raises(StartupError, match="no CUDA device"):
            make_ops("auto", "cuda")


def test_auto_and_torch_are_the_torch_operators_on_a_cpu() -> None:
    assert make_ops("auto", "cpu").name == make_ops("torch", torch.device("cpu")).name == "torch"
    assert not TorchOps.supports_graphs
