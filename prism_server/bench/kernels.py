"""`prism-bench kernels`: every timing module of this package, one after the other, on the GPU that is there."""

from __future__ import annotations

import importlib
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import torch

import prism_server.bench
from prism_server.bench.arguments import positive_number
from prism_server.bench.kernel_timing import KernelTiming, measured_bandwidth
from prism_server.bench.report import cards, environment, table, write_json
from prism_server.cli_support import ArgumentParser
from prism_server.errors import StartupError

FAILED_EXIT_CODE = 1
PREFIX = "kernels_"
DEFAULT_SECONDS = 20.0
ABOUT = """Time Prism's GPU kernels beside their twins, in CUDA graphs over more data than the L2 holds, and tell which
part of this card's memory bandwidth they reach. Needs an NVIDIA GPU. Exit code 1 if a part failed; the others count."""


class TimingModule(Protocol):
    """What `kernels_*.py` offers."""

    def measure(self, seconds: float) -> list[KernelTiming]:
        """Its kernels at the shapes that matter, in about `seconds`."""


def timing_modules() -> dict[str, str]:
    """Full names of the timing modules by what stands after `kernels_`."""
    found = (module.name for module in pkgutil.iter_modules(prism_server.bench.__path__))
    return {
        name.removeprefix(PREFIX): f"{prism_server.bench.__name__}.{name}" for name in found if name.startswith(PREFIX)
    }


def run_kernels(argv: Sequence[str]) -> int:
    modules = timing_modules()
    parser = ArgumentParser("prism-bench kernels", ABOUT)
    parser.add_argument(
        "--only", action="append", choices=modules, metavar="NAME", help=f"repeatable; one of {', '.join(modules)}"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=DEFAULT_SECONDS, metavar="X", help="for each [default: %(default)s]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the timings")
    arguments = parser.parse_strictly(argv)
    if not torch.cuda.is_available():
        raise StartupError("kernels are timed on an NVIDIA GPU; torch sees none")
    report = {
        "measurement": "kernels",
        "command": shlex.join(["prism-bench", "kernels", *argv]),
        "environment": environment() | {"cards": cards()},
        "bandwidth_bytes_per_s": round(measured_bandwidth()),
    }
    print(f"bandwidth of a matrix-vector product: {measured_bandwidth() / 1e12:.2f} TB/s\n", flush=True)
    timings: dict[str, list[KernelTiming]] = {}
    failed: dict[str, str] = {}
    for name in arguments.only or modules:
        try:
            module = cast(TimingModule, importlib.import_module(modules[name]))
            timings[name] = module.measure(arguments.seconds)
        except Exception as error:  # what others measure is not lost with it
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"prism-bench: {name}: {failed[name]}", file=sys.stderr, flush=True)
        else:
            print(f"{name}\n{table_of(timings[name])}\n", flush=True)
        if arguments.json:
            listed = {name: [timing.as_json() for timing in of_module] for name, of_module in timings.items()}
            write_json(arguments.json, {**report, "timings": listed, "failed": failed})
    return FAILED_EXIT_CODE if failed else 0


def table_of(timings: Sequence[KernelTiming]) -> str:
    header = ("kernel", "shape", "us", "of bandwidth", "twin", "twin us", "speedup")
    return table(header, [_cells(timing) for timing in timings])


def _cells(timing: KernelTiming) -> list[str]:
    fraction = f"{100 * timing.bandwidth_fraction:.0f} %" if timing.bytes_moved else ""
    twin = [timing.twin_name, f"{timing.twin_us:.1f}", f"{timing.speedup:.2f}"] if timing.twin_name else ["", "", ""]
    return [timing.name, timing.shape, f"{timing.us:.1f}", fraction, *twin]
