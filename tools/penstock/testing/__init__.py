"""For tests and benches: a whole mesh in one process, and tiny checkpoints that no download is needed for."""
