# The tests on a real Kubernetes. Without KUBECONFIG: on clusters of its own, which need root, Go 1.21, npm and Debian's
# packages (it installs those); built once for a quarter of an hour, up in seconds from then on. E2E="-k rollout" picks
# tests. With KUBECONFIG: that cluster, with the images that PRISM_E2E_REGISTRY, _TAG and _BASE_IMAGE name.

.PHONY: e2e

E2E ?=

e2e: $(STAMP)  ## the tests on a real Kubernetes
ifdef KUBECONFIG
	$(BIN)/pytest -n0 e2e $(E2E)
else ifneq ($(E2E),)
	$(BIN)/python -m e2e.cluster run -- $(BIN)/pytest -n0 e2e $(E2E)
else
	$(BIN)/python -m e2e.halves
endif
