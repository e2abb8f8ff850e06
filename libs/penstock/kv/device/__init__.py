"""Memory of an accelerator: one interface, a CUDA device and a twin of it in host memory."""
