"""A thread that sleeps as the engine's does, in a process where nothing else runs: how late the machine alone makes it.

Same lines as the paced server's.
"""

from __future__ import annotations

import json
import sys
import threading
import time


def main() -> int:
    step_s, late_ms = float(sys.argv[1]) / 1e3, list[float]()

    def sleep() -> None:
        end_s = time.perf_counter()
        while True:
            end_s = max(time.perf_counter(), end_s) + step_s
            time.sleep(max(0.0, end_s - time.perf_counter()))
            late_ms.append((time.perf_counter() - end_s) * 1e3)

    threading.Thread(target=sleep, daemon=True).start()
    print("bystander", flush=True)
    for line in sys.stdin:
        if line.strip() == "begin":
            late_ms.clear()
        else:
            print(json.dumps({"late_ms": late_ms}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
