"""Tests of the whole mesh, over real sockets."""
