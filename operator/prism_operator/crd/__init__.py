"""The PrismDeployment API: pydantic models are the one source; schema, defaults and examples come from them."""
