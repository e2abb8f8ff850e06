"""The nearest tier: blocks in the memory of a device, where engines read them without a copy through the host."""
