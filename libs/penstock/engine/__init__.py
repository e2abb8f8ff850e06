"""The inference engine: paged KV, continuous batching, chunked prefill, sampling, speculation.

`request`, `hooks`, `errors`, `config`, `scheduler` and the n-gram proposer are plain Python; torch is imported by
`engine`, `runner` and what they stand on.
"""

import os

# torch's threads that wait should sleep: spinning, they take the cores from the kernels' own threads and from the
# other processes of the host. Read when torch is loaded; who has set it is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
