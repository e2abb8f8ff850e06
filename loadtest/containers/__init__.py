"""The compose file of `deploy/`, really built and run."""
