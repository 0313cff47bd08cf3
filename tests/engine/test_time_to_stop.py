"""How long a process whose engine hangs takes to say so, beside what its pod is given."""

from __future__ import annotations

from prism_operator.children.grace import MARGIN_S
from prism_server.engine.engine import STOP_TIMEOUT_S
from prism_server.http.stop import LAST_WORDS_S
from prism_server.serving.listeners import CLOSE_TIMEOUT_S


def test_a_hung_engine_beside_a_client_that_does_not_read_is_told_of_before_the_pod_is_killed() -> None:
    assert LAST_WORDS_S + CLOSE_TIMEOUT_S + STOP_TIMEOUT_S < MARGIN_S
