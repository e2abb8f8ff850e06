"""What a CUDA device computes otherwise than plain torch. Nothing here is imported for a CPU."""
