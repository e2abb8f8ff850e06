"""KV that comes from elsewhere into a sequence's pages."""
