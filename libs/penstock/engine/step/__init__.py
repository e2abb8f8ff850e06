"""What one step computes: runs of tokens, the memory of their pages, and the tensors that the model reads."""
