"""Measures what drafts are worth."""
