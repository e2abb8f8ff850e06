"""`penstock simulate`: the router's own code before modelled workers."""
