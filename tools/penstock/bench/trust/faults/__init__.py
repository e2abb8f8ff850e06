"""The fault matrix: every service, every fault, every phase of a request."""
