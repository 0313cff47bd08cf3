# Included by the Makefile.

.PHONY: images chart

images:  ## container images by docker, buildah or podman; REGISTRY, TAG, BASE, PUSH: see images/build.sh
	images/build.sh $(IMAGES)

HELM ?= helm

chart: $(STAMP)  ## the chart's CRD from its source, then helm lint and the render tests
	$(BIN)/python -m prism_operator.crd > charts/prism/files/crd.yaml.new
	mv charts/prism/files/crd.yaml.new charts/prism/files/crd.yaml
	$(HELM) lint --strict charts/prism
	HELM=$(HELM) $(BIN)/pytest -n0 tests/chart
