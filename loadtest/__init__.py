"""Load and measurement: recorded workloads, clients and other engines, and the kept results of benches."""
