"""What a router keeps does not grow with the number of requests, whatever becomes of them and of its polls."""

from __future__ import annotations

import pickle
import random

import pytest
from router_support import LATER_S, news, pods, request, snapshot, text_request

from prism_server.router.fleet import Fleet, FleetRules, Ticket
from prism_server.router.placement import Decision, decide

RULES = FleetRules(max_texts_per_pod=50, max_hot_keys=100)
NUM_REQUESTS, EVERY_S = 2000, 0.5
SILENT, TOLD_ONCE = "pods whose polls are never answered", "pods that have answered one poll"
ONE_ANSWERS = "one pod that answers polls, and others that have answered one"


def serve(known: Fleet, first: int, rng: random.Random, polled: str) -> None:
    """Requests of all kinds: for new and for known pictures, for texts; answered, refused, broken off."""
    under_way: list[Ticket] = []
    for number in range(first, first + NUM_REQUESTS):
        now_s = LATER_S + number * EVERY_S
        asked = rng.choice((request(number, number + 1), request(number % 7), text_request(str(number))))
        decision = decide(known, asked, now_s)
        if isinstance(decision, Decision):
            under_way.append(known.dispatch(decision, asked, now_s))
        while len(under_way) > 20:
            ticket = under_way.pop(rng.randrange(20))
            if rng.random() < 0.7:
                known.first_byte(ticket, now_s)
            elif rng.random() < 0.3:
                known.refused(ticket.pod.uid, EVERY_S, now_s)
            known.finish(ticket, now_s)
        position = known.position("uid-a")
        if polled == ONE_ANSWERS and position is not None:
            known.apply("uid-a", news(position.cursor + 1), now_s, now_s)
    for ticket in under_way:
        known.finish(ticket, now_s)


@pytest.mark.parametrize("polled", [SILENT, TOLD_ONCE, ONE_ANSWERS])
def test_nothing_grows_with_the_number_of_requests(polled: str) -> None:
    known, rng = Fleet(RULES), random.Random(1)
    known.set_pods(pods(3), 0.0)
    if polled != SILENT:
        for pod in pods(3):
            known.apply(pod.uid, snapshot(), 0.0, 0.0)
    sizes_bytes = []
    for part in range(4):
        serve(known, part * NUM_REQUESTS, rng, polled)
        sizes_bytes.append(len(pickle.dumps(known)))
    assert max(sizes_bytes[1:]) < 1.5 * sizes_bytes[0]
    assert known.stats().in_flight_now == 0
    assert known.stats().expected_now < 100
