"""Block events for routers of other projects, in the format that vLLM publishes."""
