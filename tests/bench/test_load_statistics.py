"""Times of streams to figures, and the shape of a load: all of it worked out by hand or drawn twice."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter

import pytest
from PIL import Image

from prism_server.bench.load_shape import LoadMaker, LoadShape, draw_picture, poisson_arrivals_s, zipf_ranks
from prism_server.bench.plot import Curve, distribution_plot
from prism_server.bench.serve_load import Measured, Run
from prism_server.bench.serve_report import Row, report, table_of, warnings
from prism_server.bench.stream_stats import Kind, StreamResult, median, percentile, steady_tpot_ms


def stream(
    *arrivals_s: float, tokens: int = 0, kind: Kind = "stream", sent_s: float = 0.0, cached: int = 0
) -> StreamResult:
    return StreamResult(kind, sent_s, arrivals_s, tokens or len(arrivals_s), prompt_tokens=100, cached_tokens=cached)


def test_percentiles_lie_between_the_two_nearest_ranks() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 99, 100)] == [1.0, 2.5, 3.97, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    assert median([None, 3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


def test_times_of_one_stream() -> None:
    one = stream(1.5, 1.6, 1.9, 2.0, tokens=6, sent_s=1.0)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(100)  # five tokens after the first, in four chunks
    assert one.longest_gap_ms() == pytest.approx(300)
    assert one.longest_gap_ms(1.92, 1.95) == pytest.approx(100)
    assert one.longest_gap_ms(1.7, 1.8) == pytest.approx(300)  # the wait that was under way
    assert one.longest_gap_ms(2.1, 3.0) is None


def test_a_single_token_has_no_time_per_token_and_no_gap() -> None:
    assert stream(1.0).tpot_ms is None
    assert stream(1.0).longest_gap_ms() is None
    with pytest.raises(AssertionError):
        StreamResult("hot", 0.0)


def test_steady_decoding_counts_only_while_every_stream_decodes() -> None:
    slow_start = stream(0.0, 10.0, 11.0, 12.0, 13.0)
    late = stream(10.0, 11.0, 12.0, 13.0, 14.0, 20.0)
    assert steady_tpot_ms([slow_start, late]) == pytest.approx(1000)
    two_a_chunk = stream(10.0, 11.0, 12.0, 13.0, tokens=8)
    assert steady_tpot_ms([two_a_chunk]) == pytest.approx(500)
    assert steady_tpot_ms([stream(0.0, 1.0), stream(2.0, 3.0)]) is None
    assert steady_tpot_ms([]) is None


def test_a_row_keeps_kinds_apart_and_leaves_failures_out() -> None:
    first = Run(
        (
            stream(1.0, 1.1, kind="cold"),
            stream(0.2, 0.3, 0.5, kind="hot", cached=90),
            StreamResult("hot", 0.0, error="HTTP 429"),
        ),
        wall_s=2.0,
    )
    second = Run((stream(3.0, 3.1, kind="cold"), stream(0.4, 0.5, 0.6, kind="hot", cached=90)), wall_s=1.0)
    row = Row.of(Measured("b", "closed loop of 2", (first, second)))
    assert (row.num_runs, row.num_requests, row.num_failed, row.first_error) == (2, 5, 1, "HTTP 429")
    assert (row.cold_ttft_ms, row.hot_ttft_ms) == pytest.approx((2000, 300))
    assert row.longest_gap_ms == pytest.approx(150)  # of 200 and 100
    assert row.requests_per_s == pytest.approx(1.5)
    assert (row.hot_cached_tokens, row.cold_cached_tokens) == (90, 0)
    assert warnings([row]) == ["b, closed loop of 2: 1 failed: HTTP 429"]
    assert "2000.00" in table_of([row])


def test_beside_a_cold_arrival_the_gap_ends_with_its_first_token() -> None:
    cold = stream(5.0, 9.0, kind="cold", sent_s=4.0)
    streams = (stream(1.0, 3.0, 3.9, 4.7, 5.1, 8.0), stream(1.0, 4.5, 5.2))
    row = Row.of(Measured("d", "2 streams", (Run((*streams, cold), 10.0),)))
    assert row.longest_gap_ms == pytest.approx(3500)
    only_first = Row.of(Measured("d", "1 stream", (Run((streams[0], cold), 10.0),)))
    assert only_first.longest_gap_ms == pytest.approx(800)  # not the 2000 before nor the 2900 after
    assert only_first.cold_ttft_ms == pytest.approx(1000)


def test_a_server_that_knew_the_cold_pictures_is_said() -> None:
    run = Run((stream(1.0, 1.1, kind="cold", cached=99),), 1.0)
    (line,) = warnings([Row.of(Measured("a", "one at a time", (run,)))])
    assert "--seed" in line


def test_the_record_has_every_request_and_can_be_read_back() -> None:
    run = Run((stream(1.0, 1.1, kind="cold"), stream(0.2, kind="hot")), 1.0)
    kept = json.loads(json.dumps(report("prism-bench serve", "m", [3.0, 1.0, 2.0], [Measured("a", "x", (run,))])))
    assert kept["spawn_to_first_token_s"]["median"] == 2.0
    assert kept["requests"][0]["ttft_ms"] == [1000.0, 200.0]
    assert kept["requests"][0]["tpot_ms"] == [100.0, None]
    assert kept["rows"][0]["cold_ttft_ms"] == 1000.0


SMALL = LoadShape(num_groups=3, num_questions=4, pictures_per_group=2, picture_size=(64, 32), output_tokens=5)


def test_equal_seeds_make_equal_bodies_and_others_make_other_pictures() -> None:
    def bodies(shape: LoadShape) -> list[bytes]:
        return [job.body for job in LoadMaker(shape, "m").every_question("b")]

    again = LoadShape(num_groups=3, num_questions=4, pictures_per_group=2, picture_size=(64, 32), output_tokens=5)
    other = LoadShape(3, 4, 2, (64, 32), 5, seed=1)
    assert bodies(SMALL) == bodies(again)
    assert not set(bodies(SMALL)) & set(bodies(other))
    assert draw_picture("0 b 0 0", (64, 32)) != draw_picture("1 b 0 0", (64, 32))


def test_every_question_is_asked_once_and_the_first_about_a_group_is_cold() -> None:
    jobs = LoadMaker(SMALL, "m").every_question("b")
    assert Counter(job.kind for job in jobs) == {"cold": 3, "hot": 9}
    assert len({job.body for job in jobs}) == 12
    seen = set[str]()
    for job in jobs:
        body = json.loads(job.body)
        *pictures, text = body["messages"][0]["content"]
        urls = " ".join(picture["image_url"]["url"] for picture in pictures)
        assert (job.kind == "hot") == (urls in seen)
        seen.add(urls)
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[0]["image_url"]["url"].partition(",")[2])))
        assert (picture.format, picture.size, len(pictures)) == ("JPEG", (64, 32), 2)
        assert text["text"].startswith("Question")
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)


def test_zipf_draws_the_first_groups_most_and_exponent_0_all_alike() -> None:
    counts = Counter(zipf_ranks(LoadShape(num_groups=4, zipf_exponent=1.0), "s", 20_000))
    assert [counts[rank] / 20_000 for rank in range(4)] == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)
    even = Counter(zipf_ranks(LoadShape(num_groups=4, zipf_exponent=0.0), "s", 20_000))
    assert [even[rank] / 20_000 for rank in range(4)] == pytest.approx([0.25] * 4, abs=0.02)


def test_poisson_arrivals_rise_at_the_asked_rate() -> None:
    arrivals = poisson_arrivals_s(50.0, "s", 10_000)
    assert arrivals == sorted(arrivals) == poisson_arrivals_s(50.0, "s", 10_000)
    assert arrivals[-1] == pytest.approx(200, rel=0.05)
    gaps = [b - a for a, b in zip([0.0, *arrivals], arrivals, strict=False)]
    assert sum(gap < 0.02 for gap in gaps) / 10_000 == pytest.approx(0.632, abs=0.02)  # 1 - 1/e below the mean


def test_a_plot_has_a_curve_for_every_label_inside_the_frame() -> None:
    svg = distribution_plot("x < y", [Curve("a & b", [3.0, 20.0, 150.0]), Curve("c", [7.0], is_dashed=True)])
    assert svg.startswith("<svg ")
    assert "a &amp; b" in svg
    assert "x &lt; y" in svg
    assert svg.count("<polyline") == 4  # two curves, two legend marks
    assert svg.count("stroke-dasharray") == 2
    assert distribution_plot("empty", []).endswith("</svg>\n")
