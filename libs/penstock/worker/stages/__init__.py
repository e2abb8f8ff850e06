"""Stages of a worker's model on other hosts: the way to them, and what speaks for each at the worker's."""
