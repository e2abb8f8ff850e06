"""The inference engine: paged KV, continuous batching, chunked prefill, sampling, speculation.

`request`, `hooks`, `errors`, `config`, `scheduler` and the n-gram proposer are plain Python; torch is imported by
`engine`, `runner` and what they stand on.
"""
