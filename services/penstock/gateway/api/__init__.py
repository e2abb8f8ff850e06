"""What the public APIs share: bodies are read into asks, answers are written in the shape of each API."""
