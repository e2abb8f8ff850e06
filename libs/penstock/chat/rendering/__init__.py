"""Chat templates, rendered in processes of their own that can be stopped."""
