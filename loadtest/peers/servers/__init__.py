"""Servers of the peers, each started in the peer's own environment: `python -m loadtest.peers.servers.NAME --help`."""
