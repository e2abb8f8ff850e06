"""`penstock bench engine`: the bare engine beside other engines and beside the machine, in the same run."""
