"""One model over several processes, ranks: the engine's own is rank 0 and decides, the others follow its steps."""
