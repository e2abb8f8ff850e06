"""docs/measured.md: every figure comes from loadtest/results/, none is typed."""
