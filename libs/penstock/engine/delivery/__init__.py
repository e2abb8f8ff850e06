"""Delivery of a request's results: tokens to its reader, pages to its sink."""
