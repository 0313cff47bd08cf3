"""A real one-node Kubernetes in namespaces of its own: `python -m e2e.cluster --help`.

Its processes, mounts, addresses and rules live in a network, a mount, a PID and a UTS namespace that end with one
process. Outside remain only a cache folder and, while it runs, empty folders as mount points and one control group.
"""
