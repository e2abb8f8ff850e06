"""Tests of how families write calls."""
