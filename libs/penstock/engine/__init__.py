"""The inference engine: paged KV, continuous batching, chunked prefill, sampling, speculation.

A request enters by `engine`, may get KV from a source (`loading`), is put into steps (`scheduling`), which one pass
through the model computes (`forward`, over `models`, `kernels`, `step` and `layers`), gets tokens (`sampling`,
`speculation`), and hands them out (`delivery`). `request`, `hooks`, `errors` and `config` are the interface.

`scheduling`, `step.run`, the interface and the n-gram proposer are plain Python; `engine`, `forward` and what they
compute with import torch.
"""

import os

# Idle threads of torch should sleep: spinning, they take cores from the kernels' own threads and from other processes
# of the host. torch reads this when it is loaded; a value that the environment has already is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
