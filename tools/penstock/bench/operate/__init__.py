"""`penstock bench operate`: what an operator's work costs those who are served meanwhile."""
