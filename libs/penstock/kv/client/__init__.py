"""The client of a store: what a worker holds of it."""
