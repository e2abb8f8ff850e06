"""What every worker serves: Prefill with its hand-offs, and Decode with its listeners and drafts.

A worker's role says which of the two it gets new requests for; it serves both, so that its role may change while it
runs.
"""
