"""A whole mesh under load for long, whose services die and stand still and whose clients leave: nothing may leak."""
