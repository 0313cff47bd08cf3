"""The router: a request goes where its pictures are."""
