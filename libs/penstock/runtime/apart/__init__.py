"""Work in processes of their own: one that takes too long, or too much memory, can be ended, which no thread can."""
