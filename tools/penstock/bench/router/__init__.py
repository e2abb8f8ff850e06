"""`penstock bench router`: what a decision costs, and how good it is."""
