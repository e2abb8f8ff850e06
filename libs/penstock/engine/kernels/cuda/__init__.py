"""Steps on a CUDA device, where it does better than plain torch. No module here is imported for a CPU."""
