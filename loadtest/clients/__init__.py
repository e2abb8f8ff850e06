"""Clients that nobody here wrote, against a whole mesh: `make test-clients` installs them, runs them and writes the
table docs/clients.md."""
