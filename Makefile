# Everything runs in .venv, which `make` builds. Python 3.11 or newer; another one: make PYTHON=python3.12
# Another torch than PyPI's, such as the CPU build, a tenth of the size: make TORCH_INDEX_URL=<index>

PYTHON ?= python3
TORCH_INDEX_URL ?=

BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := install
.PHONY: install demo test lint unit browser screenshot examples accuracy clean

install: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Prism needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Again when pyproject.toml changes. With an index of its own torch comes first, so that the rest finds it there.
$(STAMP): pyproject.toml | $(BIN)/python
ifneq ($(TORCH_INDEX_URL),)
	$(BIN)/python -m pip install --disable-pip-version-check --index-url $(TORCH_INDEX_URL) \
		"$$(grep -o 'torch>=[^"]*' pyproject.toml)"
endif
	@echo "installing Prism and what it needs into .venv: some minutes, once"
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## eight invoice pages and questions about them, on a real server
	@$(BIN)/python -m prism_server.bench.demo

test: lint unit  ## all that must hold before a change is done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A process a core, each with one thread: OpenMP's threads of several processes would wait for one another.
unit: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

# The page's tests drive a real Chromium. Where none can be installed they are skipped, and say so.
browser:
	@for name in "$${PRISM_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do \
		if [ -n "$$name" ] && command -v "$$name" >/dev/null; then exit 0; fi; \
	done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing Chromium for the tests of the page" \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "NO CHROMIUM: the page is not tested. Install one, or name it with PRISM_CHROMIUM=PATH" >&2

screenshot: $(STAMP) browser  ## the pictures of the page in docs/images
	$(BIN)/python tests/page/screenshot.py

examples: $(STAMP)  ## the bundled examples of the page, drawn again
	$(BIN)/python -m prism_server.bench.page_examples

accuracy: $(STAMP)  ## the counts of docs/accuracy.md: some ten minutes on two cores
	$(BIN)/prism-bench accuracy --reference --json docs/measurements/accuracy_demo_cpu.json

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

include images/images.mk
include e2e/e2e.mk
