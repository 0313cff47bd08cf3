# The tests on a real Kubernetes. Without KUBECONFIG: one of its own, which needs root, Go 1.21, npm and Debian's packages
# (it installs those), builds once for a quarter of an hour and is up in seconds from then on. E2E="-k rollout" picks tests.
# With KUBECONFIG: that cluster, with the images that are named by PRISM_E2E_REGISTRY, _TAG and _BASE_IMAGE.

.PHONY: e2e

E2E ?=

e2e: $(STAMP)  ## the tests on a real Kubernetes
ifdef KUBECONFIG
	$(BIN)/pytest e2e $(E2E)
else
	$(BIN)/python -m e2e.cluster run -- $(BIN)/pytest e2e $(E2E)
endif
