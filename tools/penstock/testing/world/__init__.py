"""A mesh in one thread and in a time of its own: the real router, store and flow on a network that a seed makes, which
is slow, breaks and loses what was on its way. What goes wrong once goes wrong again under the same seed."""
