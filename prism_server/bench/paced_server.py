"""A server around a paced engine, in a process of its own; what its owner thread went through is asked for by line.

Lines on stdin: `begin` starts the record anew, `report` prints it as one line of JSON, `end` (or no more lines) stops.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from prism_server.bench.paced_engine import PacedDevice, paced_engine
from prism_server.cli_support import ArgumentParser
from prism_server.http.interpreter import set_loaded_objects_aside, share_the_lock
from prism_server.http.sockets import bind, url_of
from prism_server.serving.app import api_app
from prism_server.serving.listeners import listening
from prism_server.serving.services import Services
from prism_server.settings import ServerSettings


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("paced_server", __doc__ or "")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--checkpoint", type=Path, help="whose tokenizer and rules count [default: the bundled one's]")
    arguments = parser.parse_strictly(sys.argv[1:] if argv is None else argv)
    share_the_lock()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(arguments.step_ms, arguments.checkpoint))
    return 0


async def _serve(step_ms: float, checkpoint: Path | None) -> None:
    settings = ServerSettings.model_validate({"engine": {"max_running_sequences": 128}})
    services = Services.from_settings(settings)
    engine, device = paced_engine(settings, step_ms, checkpoint)
    bound = bind("127.0.0.1", 0, "http.port")
    async with listening([(bound, api_app(services))]):
        services.attach(engine)
        set_loaded_objects_aside()
        print(url_of(bound), flush=True)
        cpu = 0.0
        while (line := (await asyncio.to_thread(sys.stdin.readline)).strip()) in ("begin", "report"):
            if line == "begin":
                device.forget()
                cpu = time.thread_time()
            else:
                print(json.dumps(_record(device, time.thread_time() - cpu)), flush=True)
    services.close()


def _record(device: PacedDevice, loop_cpu_s: float) -> dict[str, Any]:
    steps = [step for step in device.steps if step.launched_s]
    return {
        "late_ms": [step.late_s * 1e3 for step in steps],
        "idle_ms": [step.idle_s * 1e3 for step in steps],
        "owner_cpu_s": steps[-1].owner_cpu_s - steps[0].owner_cpu_s if steps else 0.0,
        "loop_cpu_s": loop_cpu_s,
        "num_tokens": sum(step.num_sequences for step in steps),
    }


if __name__ == "__main__":
    sys.exit(main())
