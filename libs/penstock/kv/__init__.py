"""KV blocks without tensors, for processes that make, read or store them: their identity, which of them go when room is
needed, their bytes, the client of a store, and memory on a device."""
