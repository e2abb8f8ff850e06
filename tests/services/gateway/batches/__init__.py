"""Tests of files and batches: each part alone, and the whole behind the official client."""
