"""Measures eviction policies: recorded requests, replayed through the block table itself."""
