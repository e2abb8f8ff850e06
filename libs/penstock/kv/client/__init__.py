"""The client of a store, as workers use it."""
