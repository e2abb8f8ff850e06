"""Who asks, and how much they may have at a time."""
