"""The prefill service: computes the KV of uncached prompt tokens and samples the first token."""
