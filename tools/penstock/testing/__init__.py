"""For tests, ours and our users': a whole mesh in one process, tiny checkpoints, naive references."""
