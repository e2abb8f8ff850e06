"""What eviction policies are worth: recorded requests, replayed through the block table itself."""
