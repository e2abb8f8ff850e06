"""The draft service: proposes continuations for many sequences of many decode workers."""
