"""The OpenAPI document of the HTTP API, made from the types that read its requests."""
