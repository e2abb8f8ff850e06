"""`penstock bench kv`: the store's data plane beside what the machine can do."""
