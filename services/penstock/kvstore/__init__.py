"""The KV store: content-addressed blocks in shared memory, with leases, eviction and events."""
