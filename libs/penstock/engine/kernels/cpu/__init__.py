"""The decoder in C++. `build.library` compiles it, `decoder.CompiledDecoder` drives it."""
