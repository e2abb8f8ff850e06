"""Turns of the workers of one host that share cores: who computes next, and the table in shared memory where they say
what they want."""
