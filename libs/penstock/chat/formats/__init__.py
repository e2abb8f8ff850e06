"""How families of models write reasoning and tool calls: what their text looks like, how it is read and constrained."""
