"""How a store gets blocks from another host: see `base.Transport`."""
