"""Which tokens go through the model next. Plain Python: no tensors, clocks or awaits."""
