"""The page at the router's address, which is the one that users are given."""

from __future__ import annotations

from router_http_support import RouterProcess

from prism_server.page import Site

NOBODY = "http://127.0.0.1:9|http://127.0.0.1:9"


def test_the_router_has_the_page_itself_whether_there_are_pods_or_not() -> None:
    router = RouterProcess(**{"discovery.backends": NOBODY})
    try:
        for path in Site().paths:
            answer = router.http.get(router.api + path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert router.http.post(f"{router.api}/").status_code == 404
        assert router.http.get(f"{router.api}/page/../v1/generate").status_code in (404, 405)
        assert router.http.get(f"{router.admin}/").status_code == 404
    finally:
        router.close()


def test_the_routers_page_can_be_turned_off() -> None:
    router = RouterProcess(**{"discovery.backends": NOBODY, "http.page": "false"})
    try:
        assert [router.http.get(router.api + path).status_code for path in ("/", "/page/app.js")] == [404, 404]
    finally:
        router.close()
