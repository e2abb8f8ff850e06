"""What operators ask of a mesh beside its speed: a module for each part of it."""
