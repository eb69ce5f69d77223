from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.frontend import Frontend
from gateway.errors import ModelNotFound
from tests.gateway.tenants.test_effective_policy import effective

FRONTEND = cast(Any, SimpleNamespace(model=SimpleNamespace(name="served-7b")))


def refusal(model: str | None, *models: str) -> str:
    """Returns what a tenant is told that may use these models, or all."""
    with pytest.raises(ModelNotFound) as refused:
        Frontend.check_model(FRONTEND, model, effective(**({"models": models} if models else {})))
    return refused.value.message


def test_a_tenant_of_the_served_model_is_told_its_name() -> None:
    assert refusal("other") == "The model 'other' does not exist; this server has 'served-7b'."
    Frontend.check_model(FRONTEND, "served-7b", effective(models=("served-7b",)))
    for model in (None, "served-7b"):
        Frontend.check_model(FRONTEND, model, effective())
        Frontend.check_model(FRONTEND, model, None)


def test_a_tenant_denied_the_model_is_told_nothing_of_it() -> None:
    assert refusal("served-7b", "small") == "The model 'served-7b' does not exist or you have no access to it."
    for model in ("small", "other"):
        assert refusal(model, "small") == f"The model '{model}' does not exist or you have no access to it."
    assert "served" not in refusal(None, "small")
