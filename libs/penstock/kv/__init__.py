"""KV blocks without tensors: their identity, the page allocator, and the client of the store."""
