"""Blocks of other stores: who they are, what they hold, and how it is fetched."""
