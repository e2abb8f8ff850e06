"""Between messages and token ids, without torch: chat templates, tokenizing, detokenizing, tool calls, stop strings."""
