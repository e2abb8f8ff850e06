"""The decoder for a few rows, in C++. `build.library` compiles it, `thin.ThinDecoder` drives it."""
