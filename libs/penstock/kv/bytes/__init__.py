"""Bytes of blocks, in shared memory and in messages."""
