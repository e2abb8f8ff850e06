"""Recorded workloads: read, shaped, and cut to excerpts."""
