"""KV blocks without tensors, for whoever makes, reads or stores them: their identity, their bytes, the client of a
store, and memory on a device."""
