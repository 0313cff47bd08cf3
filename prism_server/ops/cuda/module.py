"""CUDA C++ from source to a function one can launch: NVRTC and the driver, through NVIDIA's own bindings."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from prism_server.errors import StartupError

PDL = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DYNAMIC_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """One function of a source file, loaded into the current device's context."""

    def __init__(
        self,
        source: Path,
        name: str,
        arguments: Sequence[type[Any]],
        shared_bytes: int,
        constants: Mapping[str, int] | None = None,
    ) -> None:
        """`arguments`: a ctypes type each, `c_void_p` for tensors; `constants`: macros of the source.

        StartupError when it does not compile or load.
        """
        major, minor = torch.cuda.get_device_capability()
        torch.cuda.current_stream()  # the device's context has to be there
        image = compiled(source, f"sm_{major}{minor}", constants or {})
        self._arguments = tuple(arguments)
        self._shared_bytes = shared_bytes
        self._module = _checked(driver.cuModuleLoadData(image))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        _checked(driver.cuFuncSetAttribute(self._function, DYNAMIC_SHARED, shared_bytes))
        self._early = driver.CUlaunchAttribute()
        self._early.id = PDL
        self._early.value.programmaticStreamSerializationAllowed = 1

    def launch(self, blocks: int, threads: int, values: Sequence[Any]) -> None:
        """On torch's current stream, as a programmatic dependent of what is there."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = [self._early]
        config.numAttrs = 1
        raw = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        _checked(driver.cuLaunchKernelEx(config, self._function, (raw, self._arguments), 0))


def compiled(source: Path, architecture: str, constants: Mapping[str, int]) -> bytes:
    """The machine code of a source file for `architecture` (`sm_90`), with these macros; needs no GPU."""
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"-default-device"]
    options += [f"--define-macro={name}={value}".encode() for name, value in constants.items()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise StartupError(f"{source.name} does not compile for {architecture}: {log.decode(errors='replace').strip()}")
    image = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value beside a status that says success."""
    status, *values = answer
    if int(status) != 0:
        raise StartupError(f"CUDA: {status.name}")
    return values[0] if values else None


POINTER = ctypes.c_void_p
