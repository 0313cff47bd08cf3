"""`helm test`: the API server takes a PrismDeployment, the operator is healthy. Writes nothing; no dependencies."""

import json
import os
import ssl
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TIMEOUT_S = 10


def check_crd(namespace: str, operator_class: str) -> None:
    """A dry run: the CRD is there, its schema and rules take the smallest object, nothing is kept."""
    with open(f"{ACCOUNT}/token", encoding="ascii") as file:
        token = file.read()
    body = {
        "apiVersion": "prism-infer.io/v1alpha1",
        "kind": "PrismDeployment",
        "metadata": {"name": "release-check"},
        "spec": {
            "operatorClass": operator_class,
            "model": {"source": {"demo": {}}},
        },
    }
    url = (
        f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        f"/apis/prism-infer.io/v1alpha1/namespaces/{namespace}/prismdeployments?dryRun=All"
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(
            request, timeout=TIMEOUT_S, context=ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
        ) as answer:
            assert json.load(answer)["kind"] == "PrismDeployment"
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the API server refused a PrismDeployment: {error} {error.read().decode()}") from error


def check_operator(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        print(f"{url}: {answer.status}")


check_crd(os.environ["NAMESPACE"], os.environ["OPERATOR_CLASS"])
print("the API server takes a PrismDeployment")
check_operator(os.environ["OPERATOR_URL"])
