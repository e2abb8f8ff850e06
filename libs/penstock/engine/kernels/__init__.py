"""Code below torch: C++ for CPUs, Triton and libraries for CUDA. Each piece has a twin in torch that defines its
result."""
