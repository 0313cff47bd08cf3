"""What `prism-bench serve` leaves behind: a row for each phase and setting, as table and JSON, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prism_server.bench.plot import Curve, distribution_plot
from prism_server.bench.report import cards, environment, table
from prism_server.bench.serve_load import Measured, Run
from prism_server.bench.stream_stats import Kind, StreamResult, median, percentile, steady_tpot_ms

Number = float | None
HEADER = (
    "phase", "setting", "runs", "asked", "failed", "cold TTFT", "hot TTFT", "hot p99", "TPOT", "longest gap", "req/s",
    "tok/s", "cached",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A phase at one setting, in milliseconds. A time to first token is the median of all requests of its kind; what
    belongs to a run (gap, rates) is the median of the runs."""

    phase: str
    setting: str
    num_runs: int
    num_requests: int
    num_failed: int
    first_error: str
    cold_ttft_ms: Number
    hot_ttft_ms: Number
    hot_ttft_p99_ms: Number
    tpot_ms: Number
    """Of streams that decode side by side, while all do; elsewhere the mean of a request."""
    longest_gap_ms: Number
    """The longest wait of any stream; beside a cold arrival, until its first token came."""
    requests_per_s: Number
    tokens_per_s: Number
    hot_cached_tokens: Number
    cold_cached_tokens: Number
    prompt_tokens: Number

    @classmethod
    def of(cls, measured: Measured) -> Row:
        results = [result for run in measured.runs for result in run.results]
        good = [result for result in results if not result.error]
        errors = [result.error for result in results if result.error]
        by_kind: dict[Kind, list[StreamResult]] = {
            kind: [result for result in good if result.kind == kind] for kind in ("cold", "hot", "stream")
        }
        return cls(
            measured.phase,
            measured.setting,
            num_runs=len(measured.runs),
            num_requests=len(results),
            num_failed=len(errors),
            first_error=errors[0] if errors else "",
            cold_ttft_ms=median(result.ttft_ms for result in by_kind["cold"]),
            hot_ttft_ms=median(result.ttft_ms for result in by_kind["hot"]),
            hot_ttft_p99_ms=percentile([result.ttft_ms for result in by_kind["hot"]], 99),
            tpot_ms=_over(measured.runs, _tpot_ms),
            longest_gap_ms=_over(measured.runs, _longest_gap_ms),
            requests_per_s=_over(measured.runs, lambda run: len(_good(run)) / run.wall_s),
            tokens_per_s=_over(measured.runs, lambda run: sum(r.num_tokens for r in _good(run)) / run.wall_s),
            hot_cached_tokens=median(result.cached_tokens for result in by_kind["hot"]),
            cold_cached_tokens=median(result.cached_tokens for result in by_kind["cold"]),
            prompt_tokens=median(result.prompt_tokens for result in good),
        )

    def cells(self) -> list[str]:
        times = (self.cold_ttft_ms, self.hot_ttft_ms, self.hot_ttft_p99_ms, self.tpot_ms, self.longest_gap_ms)
        counts = (str(self.num_runs), str(self.num_requests), str(self.num_failed))
        rates = (_shown(self.requests_per_s, 1), _shown(self.tokens_per_s, 0), _shown(self.hot_cached_tokens, 0))
        return [self.phase, self.setting, *counts, *(_shown(time_ms, 2) for time_ms in times), *rates]


def table_of(rows: Sequence[Row]) -> str:
    return f"times in ms, medians\n{table(HEADER, [row.cells() for row in rows])}"


def report(command: str, model: str, starts_s: Sequence[float], measured: Sequence[Measured]) -> dict[str, Any]:
    """The JSON: how to repeat it, where it was made, every row, and the times of every request."""
    return {
        "measurement": "serve",
        "command": command,
        "model": model,
        "environment": environment() | {"cards": cards()},
        "spawn_to_first_token_s": {"median": median(starts_s), "all": [round(start_s, 3) for start_s in starts_s]},
        "rows": [_rounded(asdict(Row.of(one))) for one in measured],
        "requests": [_requests(one) for one in measured],
    }


def plot_of(measured: Sequence[Measured]) -> str:
    """SVG: how times to first token are spread, a curve for each phase, setting and kind."""
    curves = []
    for one in measured:
        good = [result for run in one.runs for result in _good(run)]
        for kind in ("cold", "hot"):
            times_ms = [result.ttft_ms for result in good if result.kind == kind]
            if times_ms:
                curves.append(Curve(f"{one.phase}, {one.setting}: {kind}", times_ms, is_dashed=kind == "cold"))
    return distribution_plot("time to first token, ms", curves)


def warnings(rows: Sequence[Row]) -> list[str]:
    """What makes a row doubtful, a line each."""
    lines = [
        f"{row.phase}, {row.setting}: {row.num_failed} failed: {row.first_error}" for row in rows if row.num_failed
    ]
    for row in rows:
        if row.cold_cached_tokens and row.prompt_tokens and row.cold_cached_tokens > row.prompt_tokens / 2:
            lines.append(f"{row.phase}, {row.setting}: the server knew the cold pictures; take another --seed")
    return lines


def _good(run: Run) -> list[StreamResult]:
    return [result for result in run.results if not result.error]


def _over(runs: Sequence[Run], value: Callable[[Run], Number]) -> Number:
    return median(value(run) for run in runs)


def _streams(run: Run) -> list[StreamResult]:
    return [result for result in _good(run) if result.kind == "stream"]


def _tpot_ms(run: Run) -> Number:
    return steady_tpot_ms(_streams(run)) or median(result.tpot_ms for result in _good(run))


def _longest_gap_ms(run: Run) -> Number:
    streams, arrived = _streams(run), [result for result in _good(run) if result.kind == "cold"]
    if streams and arrived:
        gaps = [stream.longest_gap_ms(arrived[0].sent_s, arrived[0].first_s) for stream in streams]
    else:
        gaps = [result.longest_gap_ms() for result in _good(run)]
    return max((gap for gap in gaps if gap is not None), default=None)


def _requests(measured: Measured) -> dict[str, Any]:
    """Columns, request by request, run by run."""
    results = [result for run in measured.runs for result in _good(run)]
    return {
        "phase": measured.phase,
        "setting": measured.setting,
        "wall_s": [round(run.wall_s, 3) for run in measured.runs],
        "kind": [result.kind for result in results],
        "ttft_ms": [_round(result.ttft_ms) for result in results],
        "tpot_ms": [_round(result.tpot_ms) for result in results],
        "longest_gap_ms": [_round(result.longest_gap_ms()) for result in results],
        "tokens": [result.num_tokens for result in results],
        "cached_tokens": [result.cached_tokens for result in results],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _round(value) if isinstance(value, float) else value for name, value in values.items()}


def _round(value: Number) -> Number:
    return None if value is None else round(value, 3)


def _shown(value: Number, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
