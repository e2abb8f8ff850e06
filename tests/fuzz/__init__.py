"""Hostile inputs for every parser: kept ones, and what becomes of them when they are cut, spliced and bent.

`python -m tests.fuzz` lists the parsers, `python -m tests.fuzz PARSER --seconds 60` searches for longer.
"""
