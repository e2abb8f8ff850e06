"""Pictures: read from what clients send, cut into tiles as a model sees them, and named by what it sees of them."""
