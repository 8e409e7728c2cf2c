"""The OpenAPI description is correct, and requests that match it, or nearly do, are answered correctly."""

from __future__ import annotations

import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from manyhands.serving import Server, openapi

SCHEMA = schemathesis.openapi.from_dict(openapi.document())
CHECKS = [schemathesis.checks.not_a_server_error, status_code_conformance, response_schema_conformance]
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_operation_matches_its_openapi_schema(served: Server, http: httpx.Client, operation: object) -> None:
    @settings(
        max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    @given(case=operation.as_strategy())  # type: ignore[attr-defined]
    def ask(case: schemathesis.Case) -> None:
        # Half of the cases are about models that are there.
        if "model" in case.path_parameters and len(case.path_parameters["model"]) % 2:
            case.path_parameters["model"] = "adder"
        response = case.call(base_url=served.url)
        assert response.status_code < 500 or response.status_code in (503, 504), response.text
        case.validate_response(response, checks=CHECKS)

    ask()


def test_every_openapi_path_exists(http: httpx.Client) -> None:
    for path, operations in openapi.document()["paths"].items():
        here = path.format(model="adder", version=2, label="none")
        for method in operations:
            answer = http.request(method, here)
            assert answer.status_code in (200, 400), f"{method} {here}: {answer.status_code} {answer.text}"
            if answer.status_code == 400:
                assert answer.json()["error"]


def test_docs_page_loads_no_external_resources(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"https?://|<script|src=", page.text)
    assert "/v1/models/{model}:predict" in page.text
    assert http.get("/").text == page.text
    assert http.get("/openapi.json").json() == openapi.document()
