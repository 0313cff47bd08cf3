"""Renders charts/prism with the real helm; without one these tests have nothing to run."""

from __future__ import annotations

import os
import shutil

import pytest
from chart_support import Chart


@pytest.fixture(scope="session")
def chart() -> Chart:
    helm = shutil.which(os.environ.get("HELM", "helm"))
    if helm is None:
        pytest.skip("no helm: put it on the PATH or name it in HELM (the end-to-end tests bring one)")
    return Chart(helm)
