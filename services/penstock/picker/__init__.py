"""Tells an Envoy to which gateway a request goes: the endpoint picker of the Gateway API Inference Extension."""
