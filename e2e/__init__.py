"""Prism on a real Kubernetes: a control plane of its own (`e2e.cluster`) and the tests that run in it."""
