"""Other engines, each run in an environment and a process of its own: `python -m loadtest.peers.install`."""
