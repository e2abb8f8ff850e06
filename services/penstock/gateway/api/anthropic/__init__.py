"""Anthropic's Messages: content as blocks, its events, its errors."""
