"""Load and measurement: a client that behaves like agents do, other engines, and the kept results of benches."""
