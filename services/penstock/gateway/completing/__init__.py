"""From an ask to its answer: prompts, the way of each choice through the mesh, text, and what it cost."""
