"""One place each for serving, channels, error mapping, reconnecting, bounds of fields, and metadata of calls."""
