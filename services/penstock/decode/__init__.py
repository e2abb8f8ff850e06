"""The decode service: fetches KV, generates with continuous batching, verifies drafts, publishes what it fills."""
