"""One request in plain values: what a client asks for, its bounds, and the work that the mesh gets of it."""
