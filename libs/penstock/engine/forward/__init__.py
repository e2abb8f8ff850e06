"""One forward pass: the tokens of a step as tensors, the memory of pages, and the runner of the model."""
