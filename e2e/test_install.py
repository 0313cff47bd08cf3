"""What a person does first: apply a PrismDeployment, look at it, ask through its Service."""

from __future__ import annotations

import time

import httpx
import pytest

from e2e.cluster.layout import REPOSITORY
from e2e.harness import WAIT, Cluster
from e2e.prism import Deployed, ask, chat, events_of, invoice_pages, text_of

EXAMPLE = REPOSITORY / "examples/demo-cpu.yaml"
PAGE_TOKENS = 80
"""Of the language model, for a page of 256 x 320 pixels."""


@pytest.mark.usefixtures("demo")  # its engine has pulled the image
def test_the_example_streams_a_right_answer_after_kubectl_apply_alone(cluster: Cluster, namespace: str) -> None:
    """How long that takes is printed: it is the machine's as much as ours."""
    page = next(page for page in invoice_pages(0) if page.question == "What is the total?")
    began = time.monotonic()
    cluster.kubectl("apply", "-n", namespace, "-f", str(EXAMPLE))
    cluster.kubectl("wait", "-n", namespace, "prismdeployment/demo", "--for=condition=Ready", WAIT)
    ready_s = time.monotonic() - began
    answer, first_token_s = "", 0.0
    for event in events_of(Deployed(cluster, "demo", namespace).url, chat(page.question, page.png)):
        answer += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if answer and not first_token_s:
            first_token_s = time.monotonic() - began
    print(f"\nkubectl apply to Ready {ready_s:.1f} s, to the first token {first_token_s:.1f} s")
    assert answer == page.answer


def test_kubectl_get_shows_available_ready_pages_and_tokens(cluster: Cluster, demo: Deployed) -> None:
    pages = demo.read()["spec"]["kv"]["pages"]
    for kind in ("prismdeployments", "pd"):
        heading, row = cluster.kubectl("get", kind, "-n", demo.namespace).splitlines()
        shown = dict(zip(heading.split(), row.split(), strict=True))
        assert shown["NAME"] == shown["MODEL"] == "demo"
        assert shown["AVAILABLE"] == shown["READY"] == "True"
        assert (int(shown["PAGES"]), int(shown["TOKENS"])) == (pages, pages * 64)


def test_questions_about_an_invoice_page_are_answered_right_and_the_page_is_looked_at_once(demo: Deployed) -> None:
    pages = invoice_pages(1)
    answers = [ask(demo.url, chat(page.question, page.png, max_tokens=64)) for page in pages]
    right = sum(text_of(answer) == page.answer for answer, page in zip(answers, pages, strict=True))
    assert right >= 0.8 * len(pages)
    assert [answer.json()["prism"]["decoded_items"] for answer in answers] == [1] + [0] * (len(pages) - 1)
    reused = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert reused[0] < PAGE_TOKENS <= min(reused[1:])


def test_the_status_names_the_url_and_the_model_that_answer(demo: Deployed) -> None:
    status = demo.status
    assert status["url"] == f"http://{demo.name}.{demo.namespace}.svc"
    models = httpx.get(f"{demo.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == [status["model"]]
