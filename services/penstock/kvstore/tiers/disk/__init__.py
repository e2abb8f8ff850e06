"""The disk tier: blocks in slab files that outlive the process."""
