"""OpenAI's chat and legacy completions."""
