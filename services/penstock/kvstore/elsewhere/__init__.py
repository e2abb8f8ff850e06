"""Blocks of other stores: finding the stores that hold them, and fetching them."""
