"""The page at `/` to try a server on: plain HTML, CSS and ES modules, and the ASGI application that serves them.

Server and router serve the same files. Nothing is built, nothing comes from elsewhere, no key is asked for: the page
itself asks for one where the API wants it.
"""

from __future__ import annotations

from prism_server.page.site import Site

__all__ = ["Site"]
