"""The stage service: computes some layers of a model for a worker on another host."""
