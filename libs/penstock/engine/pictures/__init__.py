"""Pictures in the engine: a vision transformer makes embeddings of their tiles, which stand in the places of tokens."""
