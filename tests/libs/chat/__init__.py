"""Tests of the chat library."""
