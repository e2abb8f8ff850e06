"""What a request gets from the engine: tokens for its reader, pages for its sink."""
