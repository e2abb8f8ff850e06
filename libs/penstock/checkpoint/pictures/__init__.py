"""How models see pictures, from config.json and the tensors that are there."""
